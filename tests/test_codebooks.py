import pytest
import torch

from flashstudy.compress.codebooks import NF4_LEVELS, encode
from flashstudy.compress.quantize import sqnr_db
from flashstudy.compress.stores import NibbleStore


def test_nf4_takes_the_nearest_of_its_levels_as_by_hand():
    code = encode(torch.tensor([[2.0, -2.0, 0.0, 0.17, 1.2, -0.13]]), "nf4")
    # scaled by 2: 1, -1, 0, 0.085 (nearest 0.0796), 0.6 (0.5626), -0.065 (-0.0911, halfway is -0.0455)
    assert code.values.tolist() == [[15, 0, 7, 8, 13, 6]]
    assert code.dequantize()[0, 4].item() == pytest.approx(2 * 0.5626170039176941)


def test_nf4_agrees_with_the_library():
    from torchao.quantization import to_nf4

    weight = torch.randn(64, 256)
    theirs = to_nf4(weight, block_size=64, scaler_block_size=256).get_original_weight()
    ours = encode(weight, "nf4", granularity="group", group_size=64).dequantize()
    # they round their scales to 8 bits too: the codes must be the same nearly everywhere
    assert ((theirs - ours).abs() > 0.1).float().mean() < 0.01
    assert sqnr_db(weight, ours) == pytest.approx(sqnr_db(weight, theirs), abs=0.5)


def test_nf4_fits_normal_weights_better_than_int4_does():
    from flashstudy.compress.quantize import fake_quantize

    weight = torch.randn(256, 256)
    nf4 = encode(weight, "nf4", granularity="group", group_size=64).dequantize()
    int4 = fake_quantize(weight, bits=4, granularity="group", group_size=64)
    assert sqnr_db(weight, nf4) > sqnr_db(weight, int4) + 0.5


def test_fp8_meets_its_largest_value_and_keeps_four_significant_bits():
    weight = torch.tensor([[448.0, 1.0625, -17.0, 0.0]])
    code = encode(weight, "fp8")
    assert code.scale.item() == 1.0 and code.values.dtype == torch.float8_e4m3fn
    assert code.dequantize().tolist() == [[448.0, 1.0, -16.0, 0.0]]  # ties to even mantissas
    assert encode(weight * 3, "fp8").dequantize()[0, 0].item() == pytest.approx(3 * 448)


@pytest.mark.parametrize("weight_format", ["nf4", "fp8"])
def test_all_zero_groups_and_empty_weights_stay_what_they_are(weight_format):
    weight = torch.randn(4, 64)
    weight[1] = 0
    code = encode(weight, weight_format, granularity="group", group_size=32)
    assert (code.dequantize()[1] == 0).all() and code.scale.isfinite().all()
    assert encode(torch.zeros(0, 64), weight_format).dequantize().shape == (0, 64)


def test_bytes_match_the_hand_count():
    nf4 = encode(torch.randn(8, 64), "nf4", granularity="group", group_size=64)
    assert nf4.stored_bytes == 8 * 64 // 2 + 8 * 2
    assert encode(torch.randn(8, 64), "fp8").stored_bytes == 8 * 64 + 8 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_store_gives_the_levels_back(dtype):
    code = encode(torch.randn(8, 64), "nf4", granularity="group", group_size=32)
    found = NibbleStore(code).rows(2, 7, dtype)
    expected = code.dequantize()[2:7]
    assert found.dtype == dtype
    assert (found.float() - expected).norm() <= 0.01 * expected.norm()
    assert sorted(NF4_LEVELS) == list(NF4_LEVELS) and len(NF4_LEVELS) == 16


def test_other_formats_and_groups_are_refused():
    with pytest.raises(ValueError, match="'fp6' is not one of nf4, fp8"):
        encode(torch.randn(2, 4), "fp6")
    with pytest.raises(ValueError, match="does not divide 48 in_features"):
        encode(torch.randn(2, 48), "nf4", granularity="group", group_size=32)
