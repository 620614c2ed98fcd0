import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstudy.compress.quantize import fake_quantize, group_sizes, quantize, sqnr_db


@pytest.fixture
def uniform_weight(generator):
    return torch.rand(64, 1024, generator=generator) * 2 - 1


def test_one_row_rounds_as_by_hand():
    # absmax 1.27 at 8 bits: scale 0.01 exactly, so the codes are the hundredths
    quantized = quantize(torch.tensor([[1.27, -0.5, 0.014, 0.016]]), bits=8)
    assert quantized.values.tolist() == [[127, -50, 1, 2]]
    assert quantized.scale.item() == pytest.approx(0.01)


def test_asymmetric_row_rounds_as_by_hand():
    # 0 … 3 on four levels: scale 1, codes shifted by -2
    quantized = quantize(torch.tensor([[0.0, 1.0, 2.2, 3.0]]), bits=2, symmetric=False)
    assert quantized.values.tolist() == [[-2, -1, 0, 1]]
    assert quantized.zero_point.tolist() == [[-2]]
    assert quantized.dequantize().tolist() == [[0.0, 1.0, 2.0, 3.0]]


@pytest.mark.parametrize("symmetric", [True, False])
def test_one_more_bit_buys_six_db(uniform_weight, symmetric):
    sqnr = {
        bits: sqnr_db(uniform_weight, fake_quantize(uniform_weight, bits=bits, symmetric=symmetric)) for bits in (7, 8)
    }
    assert sqnr[8] - sqnr[7] == pytest.approx(6.02, abs=0.1)


def test_sqnr_of_uniform_data_is_that_of_its_step(uniform_weight):
    # signal power 1/3, noise power step² / 12 with step = 2 / 254
    expected = 10 * math.log10((1 / 3) / ((1 / 127) ** 2 / 12))
    assert sqnr_db(uniform_weight, fake_quantize(uniform_weight, bits=8)) == pytest.approx(expected, abs=0.05)


def test_four_bits_give_exactly_fifteen_symmetric_and_sixteen_asymmetric_levels(uniform_weight):
    assert quantize(uniform_weight, bits=4).values[0].unique().tolist() == list(range(-7, 8))
    assert quantize(uniform_weight, bits=4, symmetric=False).values[0].unique().tolist() == list(range(-8, 8))


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_lowest_code_is_never_used(bits):
    weight = torch.tensor([[-1.0, -0.999, 0.5]])
    assert quantize(weight, bits=bits).values.min() == -(2 ** (bits - 1) - 1)


def test_all_zero_groups_come_back_as_exact_zeros(uniform_weight):
    weight = uniform_weight.clone()
    weight[3] = 0
    weight[5, 64:128] = 0
    for symmetric in (True, False):
        rounded = fake_quantize(weight, bits=4, granularity="group", group_size=64, symmetric=symmetric)
        assert torch.equal(rounded[3], weight[3]) and torch.equal(rounded[5, 64:128], weight[5, 64:128])
        assert rounded.isfinite().all()


def test_zero_stays_exactly_zero_on_an_asymmetric_grid(generator):
    weight = torch.rand(8, 64, generator=generator) + 0.1  # all positive: zero lies outside the data
    weight[:, 7] = 0
    assert (fake_quantize(weight, bits=3, symmetric=False)[:, 7] == 0).all()


def test_codes_on_the_grid_survive_exactly(generator):
    codes = torch.randint(-7, 8, (16, 64), generator=generator).float()
    codes[:, 0] = 7
    assert torch.equal(fake_quantize(codes * 0.25, bits=4), codes * 0.25)


def test_finer_granularity_loses_less(generator):
    weight = torch.randn(64, 256, generator=generator) * torch.rand(64, 256, generator=generator).exp()
    grids = [("tensor", 0), ("channel", 0), ("group", 128), ("group", 32)]
    sqnr = [sqnr_db(weight, fake_quantize(weight, bits=4, granularity=name, group_size=size)) for name, size in grids]
    assert sqnr == sorted(sqnr)
    assert sqnr[-1] - sqnr[0] > 1


def test_a_group_as_long_as_the_row_is_a_channel(uniform_weight):
    by_group = fake_quantize(uniform_weight, bits=5, granularity="group", group_size=1024)
    assert torch.equal(by_group, fake_quantize(uniform_weight, bits=5))


def test_stored_bytes_match_the_hand_count():
    weight = torch.ones(8, 576)
    assert quantize(weight, bits=8).stored_bytes == 8 * 576 + 8 * 2
    assert quantize(weight, bits=4, granularity="group", group_size=64).stored_bytes == 8 * 576 // 2 + 8 * 9 * 2
    asymmetric = quantize(weight, bits=4, granularity="group", group_size=64, symmetric=False)
    assert asymmetric.stored_bytes == 8 * 576 // 2 + 8 * 9 * 4
    assert quantize(weight, bits=4, granularity="group", group_size=64).bits_per_weight == 4.25


def test_the_weight_is_left_alone(uniform_weight):
    before = uniform_weight.clone()
    quantize(uniform_weight, bits=4, granularity="group", group_size=32, symmetric=False)
    assert torch.equal(before, uniform_weight)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    n_groups=st.integers(1, 3),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    spread=st.sampled_from([1e-30, 1e-3, 1.0, 1e6]),
    seed=st.integers(0, 10_000),
)
def test_no_weight_moves_further_than_its_step_allows(rows, n_groups, bits, symmetric, spread, seed):
    weight = torch.randn(rows, 8 * n_groups, generator=torch.Generator().manual_seed(seed)) * spread
    quantized = quantize(weight, bits=bits, granularity="group", group_size=8, symmetric=symmetric)
    error = (quantized.dequantize() - weight).abs().reshape(rows, n_groups, 8)
    # half a step; an integer zero point may cost another half at the ends of the range
    allowed = quantized.scale[..., None] * (0.5 if symmetric else 1.0)
    assert (error <= allowed * (1 + 1e-4)).all()
    again = quantize(quantized.dequantize(), bits=bits, granularity="group", group_size=8, symmetric=symmetric)
    assert torch.allclose(again.dequantize(), quantized.dequantize(), rtol=1e-5) or not symmetric


def test_matrices_without_weights_are_quantized_to_nothing():
    assert quantize(torch.empty(0, 64), bits=8).values.shape == (0, 64)
    for symmetric in (True, False):
        assert quantize(torch.empty(3, 0), bits=8, symmetric=symmetric).dequantize().shape == (3, 0)


def test_bf16_weights_round_like_their_fp32_values(uniform_weight):
    weight = uniform_weight.bfloat16()
    assert torch.equal(quantize(weight, bits=8).values, quantize(weight.float(), bits=8).values)
    assert fake_quantize(weight, bits=8).dtype == torch.bfloat16


def test_sqnr_of_an_exact_copy_is_infinite_and_of_half_the_signal_six_db(uniform_weight):
    assert sqnr_db(uniform_weight, uniform_weight) == math.inf
    assert sqnr_db(uniform_weight, uniform_weight / 2) == pytest.approx(20 * math.log10(2))


def test_group_sizes_of_576_are_64_and_32():
    assert group_sizes(576) == [64, 32]
    assert group_sizes(4096) == [256, 128, 64, 32]
    assert group_sizes(12) == [4, 2]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(bits=1), "bits 1 is not an integer from 2 to 8"),
        (dict(bits=4.0), "bits 4.0 is not an integer"),
        (dict(bits=4, granularity="row"), "'row' is not one of tensor, channel, group"),
        (dict(bits=4, granularity="group", group_size=128), "128 does not divide 576 in_features; 576 takes 64 or 32"),
        (dict(bits=4, granularity="group"), "group_size 0 does not divide"),
        (dict(bits=4, group_size=64), "group_size 64 needs granularity 'group'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(4, 576), **options)


def test_bad_weights_are_refused():
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(torch.tensor([[1.0, math.nan]]), bits=8)
    with pytest.raises(ValueError, match="float matrix"):
        quantize(torch.ones(4), bits=8)
    with pytest.raises(ValueError, match="all-zero"):
        sqnr_db(torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="equal shapes"):
        sqnr_db(torch.ones(3), torch.ones(4))
