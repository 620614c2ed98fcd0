import copy

import pytest
import torch

from flashstudy.compress import packed
from flashstudy.compress.kernel_table import KERNELS, WeightLayout, choose_kernel
from flashstudy.compress.linear import available_kernels, make_linear
from flashstudy.compress.probes import error_bound, exact_weight, random_weight, relative_error
from flashstudy.compress.prune import block_mask, magnitude_mask
from flashstudy.compress.quantize import fake_quantize

LAYOUTS = [
    WeightLayout("fp32"),
    WeightLayout("bf16"),
    WeightLayout("fp16"),
    WeightLayout("int8"),
    WeightLayout("int8", granularity="tensor"),
    WeightLayout("int8", granularity="group", group_size=32),
    WeightLayout("int8", symmetric=False),
    WeightLayout("int4", granularity="group", group_size=32),
    WeightLayout("int4", granularity="group", group_size=64, symmetric=False),
    WeightLayout("int4"),
    WeightLayout("fp32", sparse_format="bitmap"),
    WeightLayout("bf16", sparse_format="bitmap"),
    WeightLayout("int8", sparse_format="bitmap"),
    WeightLayout("int8", sparse_format="bitmap", granularity="group", group_size=32),
    WeightLayout("fp32", sparse_format="csr"),
    WeightLayout("fp32", sparse_format="bsr", block=(8, 8)),
    WeightLayout("nf4", granularity="group", group_size=64),
    WeightLayout("nf4"),
    WeightLayout("fp8"),
    WeightLayout("fp8", granularity="tensor"),
    WeightLayout("fp8", granularity="group", group_size=32),
    WeightLayout("fp32", sparse_format="masked"),
    WeightLayout("bf16", sparse_format="masked"),
    WeightLayout("fp32", sparse_format="structured"),
    WeightLayout("fp16", sparse_format="structured"),
]
SHAPES = [(96, 128), (33, 64), (7, 192)]


def options(layout):
    return {name: value for name, value in vars(layout).items()}


def usable(layout, shape):
    infos = available_kernels(layout.weight_format, layout=layout, shape=shape)
    return [info for info in infos if info.available and not info.compiled]  # one compiled kernel has its own test


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_kernel_agrees_with_float64(layout, shape):
    if layout.sparse_format == "bsr":
        shape = (shape[0] // 8 * 8 or 8, shape[1])
    weight = random_weight(*shape, layout, sparsity=0.5, seed=0)
    weight[0, :32] = 0
    infos = usable(layout, shape)
    assert infos
    for info in infos:
        layer = make_linear(weight, kernel=info.kernel, **options(layout))
        error = relative_error(layer, exact_weight(layer, weight, layout), torch.float32)
        bound = error_bound(layout.weight_format, info.activation_dtype)
        assert error <= bound, f"{info.kernel}: {error:.2g} > {bound:.2g}"


def test_a_compiled_kernel_agrees_with_its_own_codes():
    infos = {info.kernel: info for info in available_kernels("int8", shape=(32, 64))}
    if not infos["torchao_compiled"].available:
        pytest.skip(infos["torchao_compiled"].reason)
    weight = torch.randn(32, 64)
    layer = make_linear(weight, weight_format="int8", kernel="torchao_compiled")
    exact = exact_weight(layer, weight, WeightLayout("int8"))
    assert relative_error(layer, exact, torch.float32) < error_bound("int8")
    assert not torch.equal(exact, weight.double())


def test_two_of_four_is_a_row_with_a_reason_where_torch_has_no_such_product():
    (info,) = available_kernels("bf16", layout=WeightLayout("bf16", sparse_format="n_m"), shape=(64, 64))
    assert not info.available and "CUDA from compute capability 8.0" in info.reason


def test_structured_zeros_leave_a_smaller_dense_weight():
    weight = torch.randn(8, 12)
    weight[1], weight[5], weight[:, 3] = 0, 0, 0
    layer = make_linear(weight, torch.ones(8), weight_format="fp32", kernel="structured", sparse_format="structured")
    assert layer.product.weight.shape == (6, 11)
    x = torch.randn(3, 12)
    assert torch.allclose(layer(x), x @ weight.T + 1, atol=1e-5)
    assert (layer(x)[:, [1, 5]] == 1).all()
    nothing = make_linear(torch.zeros(4, 4), weight_format="fp32", kernel="structured", sparse_format="structured")
    assert (nothing(torch.ones(2, 4)) == 0).all()


def test_a_masked_weight_keeps_its_values_and_a_byte_each():
    weight = torch.randn(8, 16) * magnitude_mask(torch.randn(8, 16), 0.5)
    layer = make_linear(weight, weight_format="fp32", kernel="masked", sparse_format="masked")
    assert layer.stored_bytes == layer.read_bytes == 8 * 16 * (4 + 1)


@pytest.mark.parametrize("weight_format", ["nf4", "fp8"])
def test_symmetric_codebooks_refuse_a_zero_point(weight_format):
    with pytest.raises(ValueError, match="has no zero point"):
        make_linear(torch.randn(4, 64), weight_format=weight_format, kernel="tiled", symmetric=False)


@pytest.mark.parametrize("shape", [(5, 63), (3, 1), (1, 250)], ids=str)
def test_odd_widths_run_where_the_kernel_allows_and_say_why_where_not(shape):
    weight, x = torch.randn(shape), torch.randn(3, shape[1])
    infos = {info.kernel: info for info in available_kernels("int8", shape=shape)}
    assert not infos["int8pack"].available
    assert f"divisible by 16, not {shape[1]}" in infos["int8pack"].reason
    for kernel in ("dequantize", "tiled", "int_mm", "dynamic_int8"):
        layer = make_linear(weight, weight_format="int8", kernel=kernel)
        expected = x @ fake_quantize(weight, bits=8).T
        assert (layer(x) - expected).norm() / (x.norm() * weight.norm()) < 0.02, kernel


@pytest.mark.parametrize("layout", LAYOUTS[:9], ids=str)
def test_no_rows_one_row_and_batches_keep_their_shapes_and_bias(layout):
    weight, bias = torch.randn(16, 64), torch.randn(16)
    for info in usable(layout, (16, 64)):
        layer = make_linear(weight, bias, kernel=info.kernel, **options(layout))
        assert layer(torch.ones(0, 64)).shape == (0, 16)
        assert layer(torch.ones(2, 0, 64)).shape == (2, 0, 16)
        x = torch.randn(2, 3, 64)
        assert layer(x).shape == (2, 3, 16) and layer(x[0, 0]).shape == (16,)
        assert torch.allclose(layer(torch.zeros(4, 64)), bias.expand(4, 16), atol=1e-6), info.kernel
        assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("kernel", [info.kernel for info in KERNELS if info.activation_dtype == "int8"])
def test_a_first_token_spike_leaves_the_other_rows_alone(kernel):
    if not {info.kernel: info.available for info in available_kernels("int8")}[kernel]:
        pytest.skip(f"{kernel} is not available here")
    layer = make_linear(torch.randn(64, 256), weight_format="int8", kernel=kernel)
    quiet = torch.randn(4, 256)
    spiky = torch.cat([torch.full((1, 256), 3000.0), quiet])
    # a zero point that the kernel shares among rows moves the rounding of all of them (2%); a shared scale loses them
    assert (layer(spiky)[1:] - layer(quiet)).norm() < 0.05 * layer(quiet).norm()


@pytest.mark.parametrize("kernel", ["dynamic_int8", "dynamic_int8_onednn", "int_mm"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_do_not_saturate(kernel, sign):
    if not {info.kernel: info.available for info in available_kernels("int8")}[kernel]:
        pytest.skip(f"{kernel} is not available here")
    # all products of a pair at their largest: 16-bit sums of two would lose half of it
    layer = make_linear(torch.ones(32, 256), weight_format="int8", kernel=kernel)
    x = torch.ones(2, 256) * sign
    x[1, ::2] *= -1
    result = layer(x)
    assert torch.allclose(result[0], torch.full((32,), 256.0 * sign), rtol=0.01)
    assert result[1].abs().max() < 0.01 * 256


def test_eight_bit_activations_saturate_without_the_reduced_range_where_the_cpu_says_so():
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no fbgemm here")
    layer = make_linear(torch.ones(32, 256), weight_format="int8", kernel="dynamic_int8")
    layer.product.reduce_range = False
    loses = bool((layer(torch.ones(1, 256)) < 250).any())
    assert loses == packed.saturates("fbgemm")


def test_activations_of_minus_128_cannot_appear():
    layer = make_linear(torch.eye(64), weight_format="int8", kernel="int_mm")
    assert torch.allclose(layer(torch.full((1, 64), -7.0)), torch.full((1, 64), -7.0), rtol=1e-5)


def test_all_zero_weights_and_rows_give_zeros():
    weight = torch.randn(16, 64)
    weight[3] = 0
    for info in usable(WeightLayout("int8"), (16, 64)):
        layer = make_linear(weight, weight_format="int8", kernel=info.kernel)
        assert (layer(torch.randn(5, 64))[:, 3] == 0).all(), info.kernel
        assert (layer(torch.zeros(2, 64)) == 0).all(), info.kernel


def test_stored_and_read_bytes_match_the_hand_count():
    weight = torch.randn(32, 64)
    pruned = weight * magnitude_mask(weight, 0.5)
    blocks = weight * block_mask(weight, 0.75, (8, 8))
    assert make_linear(weight, weight_format="fp32", kernel="dense").stored_bytes == 32 * 64 * 4
    assert make_linear(weight, weight_format="bf16", kernel="dense").read_bytes == 32 * 64 * 2
    int8 = make_linear(weight, weight_format="int8", kernel="int8pack")
    assert int8.stored_bytes == int8.read_bytes == 32 * 64 + 32 * 2
    int4 = make_linear(weight, weight_format="int4", kernel="int4pack", granularity="group", group_size=32)
    assert int4.stored_bytes == 32 * 64 // 2 + 32 * 2 * 2
    assert int4.read_bytes == 32 * 64 // 2 + 32 * 2 * 4  # the kernel reads a zero with every scale
    bitmap = make_linear(pruned, weight_format="fp32", kernel="bitmap", sparse_format="bitmap")
    assert bitmap.stored_bytes == bitmap.read_bytes == 32 * 64 // 8 + 1024 * 4
    csr = make_linear(pruned, weight_format="fp32", kernel="csr", sparse_format="csr")
    assert csr.stored_bytes == csr.read_bytes == 1024 * 4 + (1024 + 33) * 4
    bsr = make_linear(blocks, weight_format="fp32", kernel="bsr", sparse_format="bsr", block=(8, 8))
    assert bsr.stored_bytes == bsr.read_bytes == 8 * 64 * 4 + (8 + 5) * 4


def test_a_bitmap_of_codes_stores_values_bits_and_scales():
    weight = torch.randn(32, 64)
    pruned = weight * magnitude_mask(weight, 0.5)
    layer = make_linear(pruned, weight_format="int8", kernel="bitmap", sparse_format="bitmap")
    n_codes = int((fake_quantize(pruned, bits=8) != 0).sum())  # what rounds to zero needs no place
    assert layer.stored_bytes == 32 * 64 // 8 + n_codes + 32 * 2
    assert n_codes <= 1024


def test_the_dense_float_weight_is_shared_not_copied():
    weight = torch.randn(8, 64)
    layer = make_linear(weight, weight_format="fp32", kernel="dense")
    assert layer.product.weight.data_ptr() == weight.data_ptr()


def test_stored_dense_multiplies_the_rounded_weight():
    weight, x = torch.randn(8, 64), torch.randn(3, 64)
    layer = make_linear(weight, weight_format="int4", kernel_path="stored_dense", granularity="group", group_size=32)
    expected = x @ fake_quantize(weight, bits=4, granularity="group", group_size=32).T
    assert torch.allclose(layer(x), expected, atol=1e-5)
    assert layer.stored_bytes == 8 * 64 // 2 + 8 * 2 * 2
    assert layer.info.kernel_path == "stored_dense"


@pytest.mark.parametrize("kernel", ["tiled", "int8pack_tiled", "dynamic_int8", "torchao", "int_mm"])
def test_a_deep_copy_has_tensors_of_its_own_and_computes_the_same(kernel):
    layer = make_linear(torch.randn(16, 64), weight_format="int8", kernel=kernel)
    twin = copy.deepcopy(layer)
    x = torch.randn(20, 64)
    assert torch.equal(twin(x), layer(x))
    mine = {tensor.data_ptr() for tensor in layer.buffers() if tensor.numel()}
    assert not mine & {tensor.data_ptr() for tensor in twin.buffers() if tensor.numel()}


def test_int8pack_and_its_tiles_share_one_store():
    layer = make_linear(torch.randn(64, 64), weight_format="int8", kernel="int8pack_tiled")
    twin = copy.deepcopy(layer)
    assert layer.product.few.store is layer.product.many.store
    assert twin.product.few.store is twin.product.many.store


def test_a_path_without_a_kernel_name_takes_its_first_kernel():
    layer = make_linear(torch.randn(16, 64), weight_format="int8", kernel_path="fused")
    assert layer.info.kernel == "int8pack"
    assert (
        make_linear(torch.randn(16, 64), weight_format="int8", kernel_path="dequantize_then_matmul").info.role
        == "naive"
    )


def test_torchao_int4_is_a_row_with_a_reason_or_works():
    info = next(info for info in available_kernels("int4") if info.kernel == "torchao")
    assert info.available or info.reason.startswith("torchao: ")


@pytest.mark.parametrize(
    "layout, kernel, message",
    [
        (WeightLayout("int8", granularity="group", group_size=32), "int8pack", "one scale a row or one for all"),
        (WeightLayout("int8", symmetric=False), "dynamic_int8", "symmetric codes only"),
        (WeightLayout("int8", granularity="tensor"), "torchao", "one scale a row"),
        (WeightLayout("int4"), "int4pack", "groups of 32, 64, 128, 256 only"),
        (WeightLayout("int8", symmetric=False, sparse_format="bitmap"), "bitmap", "symmetric codes only"),
        (WeightLayout("fp32", sparse_format="bsr", block=(8, 16)), "bsr", "square blocks only"),
        (WeightLayout("fp32", sparse_format="bsr", block=(5, 5)), "bsr", r"block \(5, 5\) does not divide \(16, 64\)"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_with_the_reason(layout, kernel, message):
    with pytest.raises(ValueError, match=message):
        make_linear(torch.randn(16, 64), kernel=kernel, **options(layout))


def test_unknown_names_are_refused_with_what_there_is():
    weight = torch.randn(16, 64)
    with pytest.raises(ValueError, match="int8 weights stored dense have no kernel 'magic'; there are dequantize"):
        make_linear(weight, weight_format="int8", kernel="magic")
    with pytest.raises(ValueError, match="'fp7' has no kernel; there are bf16, fp16, fp32, fp8, int4, int8, nf4"):
        make_linear(weight, weight_format="fp7", kernel="dense")
    with pytest.raises(ValueError, match="kernel_path 'unknown' names no kernel"):
        make_linear(weight, weight_format="int8", kernel_path="unknown")
    with pytest.raises(ValueError, match="have no kernel 'dense'; there are none"):
        make_linear(weight, weight_format="int4", kernel_path="dense", sparse_format="csr")
    with pytest.raises(ValueError, match=r"64 in_features, got an input \[2, 32\]"):
        make_linear(weight, weight_format="fp32", kernel="dense")(torch.ones(2, 32))
    with pytest.raises(ValueError, match="NaN"):
        make_linear(weight / 0, weight_format="fp32", kernel="dense")


def test_packed_cpu_kernels_are_rows_with_a_reason_on_another_device():
    layout = WeightLayout("int8")
    with pytest.raises(ValueError, match="for the CPU, not 'cuda'"):
        choose_kernel(layout, (16, 64), "", "int8pack", "cuda")
