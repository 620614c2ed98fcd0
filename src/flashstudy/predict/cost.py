"""What one step has to do, counted in closed form: FLOP, bytes, conversions and kernels; no time and no device.

Bytes read are the stored ones, kept apart from what a path adds: `dequantize_then_matmul` writes each weight at full
width and reads it again, unpacking a bitmap does the same at stored width. Counted are the matrices, attention, the
output head and elementwise passes; embedding look-ups and softmax are left out. The head is not compressed, as GPTQ,
AWQ and bitsandbytes leave it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashstudy.facts.models import ModelShape
from flashstudy.facts.recipes import KV_BITS, WEIGHT_BITS, Recipe

# Kernels of one decoder layer, the matrices and attention among them. Eager: two RMSNorms of 8, RoPE 10, cache 2,
# attention 4, residuals 2, gated MLP 5, q k v o 4 (counted from the Llama modeling file of transformers 5.24).
KERNELS_PER_LAYER = {"eager": 43, "compiled": 14, "graph": 43, "cpp": 16}
# Kernels that a path adds to each product. decomposed_int8 splits outlier columns off, which costs about eight kernels
# and two waits for the host, each worth several. Source: bitsandbytes MatMul8bitLt (2023).
KERNELS_PER_PRODUCT = {
    "dequantize_then_matmul": 2, "native_lowbit": 2, "decomposed_int8": 25, "fallback_dtype": 1,
}  # fmt: skip
KERNELS_TO_UNPACK = {"bitmap": 6, "csr": 3, "bsr": 3}
KERNELS_PER_KV_CONVERSION = 8  # K and V: scale, round, cast on the way in; cast, multiply on the way out

PHASES = ("prefill", "decode")
NAIVE_PATHS = ("dequantize_then_matmul", "fallback_dtype")  # write the weight at full width before multiplying
ROW_TILE = 128  # rows for which a fused kernel converts a weight once (CUTLASS and oneDNN block M by 64 to 256)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one group of kernels. Bytes are read unless named written; conversions count values, not bytes."""

    flop: float = 0.0
    arithmetic_format: str = "fp32"
    rows: float = 1.0
    weight_bytes: float = 0.0
    index_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    dequantized_values: float = 0.0
    dequantized_bytes: float = 0.0  # written at full width and read again
    unpacked_values: float = 0.0
    unpacked_bytes: float = 0.0  # written unpacked and read again
    converted_at_once: float = 1.0  # values that one conversion kernel handles
    n_kernels: float = 0.0
    path: str = "dense"
    sparse_product: bool = False  # multiplied in CSR or BSR, by kernels that skip zeros

    @property
    def read_bytes(self) -> float:
        """Bytes that cannot be avoided with this storage: weights, indices and KV cache, activations left out."""
        return self.weight_bytes + self.index_bytes + self.kv_bytes


def width_bytes(number_format: str) -> float:
    """Bytes of one value."""
    return WEIGHT_BITS[number_format] / 8


def linear(out_features: int, in_features: int, rows: float, recipe: Recipe, compute_format: str) -> Work:
    """The work of activations [rows, in] × weight [out, in]; `compute_format` is that of the activations.

    Raises ValueError for kernel_path "unknown", which has no cost of its own.
    """
    if recipe.kernel_path == "unknown":
        raise ValueError(f"recipe {recipe.name!r}: the cost of kernel_path 'unknown' is not defined, choose a path")
    values, indices, scales = recipe.stored_bytes(out_features, in_features)
    n_weights = out_features * in_features
    path = recipe.kernel_path
    if path == "stored_dense":  # compressed in value only
        values, indices, scales = n_weights * width_bytes(compute_format), 0.0, 0.0
    as_stored = recipe.sparse_format in ("n_m", "structured") and path in ("fused", "native_lowbit")
    skips_zeros = as_stored or _is_sparse_product(recipe)
    conversions = _conversions(recipe, n_weights, rows, compute_format)
    return Work(
        flop=2 * rows * n_weights * (recipe.stored_density if skips_zeros else 1.0),
        arithmetic_format=_arithmetic_format(recipe, compute_format),
        rows=rows,
        weight_bytes=values + scales,
        index_bytes=indices,
        activation_bytes=rows * (in_features + out_features) * width_bytes(compute_format),
        n_kernels=1 + KERNELS_PER_PRODUCT.get(path, 0) + _unpack_kernels(recipe),
        converted_at_once=n_weights,
        path=path,
        sparse_product=_is_sparse_product(recipe),
        **conversions,
    )


def _arithmetic_format(recipe: Recipe, compute_format: str) -> str:
    if recipe.kernel_path in ("native_lowbit", "decomposed_int8"):
        return recipe.weight_format
    return "fp32" if recipe.kernel_path == "fallback_dtype" else compute_format


def _is_sparse_product(recipe: Recipe) -> bool:
    return recipe.kernel_path == "fused" and recipe.sparse_format in ("csr", "bsr")


def _is_unpacked(recipe: Recipe) -> bool:
    """Whether stored values have to be placed among zeros before they are multiplied."""
    multiplied_as_stored = recipe.sparse_format not in ("bitmap", "csr", "bsr") or _is_sparse_product(recipe)
    return not multiplied_as_stored and recipe.kernel_path != "stored_dense"


def _unpack_kernels(recipe: Recipe) -> int:
    return KERNELS_TO_UNPACK[recipe.sparse_format] if _is_unpacked(recipe) and recipe.kernel_path in NAIVE_PATHS else 0


def _conversions(recipe: Recipe, n_weights: int, rows: float, compute_format: str) -> dict[str, float]:
    """The fields of Work that say what it takes to turn stored values into multiplied ones."""
    path = recipe.kernel_path
    naive = path in NAIVE_PATHS
    passes = 1.0 if naive else max(1.0, rows / ROW_TILE)
    found = {}
    converts = recipe.is_quantized or recipe.sparse_format == "masked"
    if path == "fallback_dtype" or converts and path in ("dequantize_then_matmul", "fused"):
        stored = n_weights * (recipe.stored_density if _is_sparse_product(recipe) else 1.0)
        wide_bytes = 2 * n_weights * width_bytes(_arithmetic_format(recipe, compute_format))
        found |= {"dequantized_values": stored * passes, "dequantized_bytes": wide_bytes if naive else 0.0}
    if _is_unpacked(recipe):
        unpacked_bytes = 2 * n_weights * width_bytes(recipe.weight_format)
        found |= {"unpacked_values": n_weights * passes, "unpacked_bytes": unpacked_bytes if naive else 0.0}
    return found


def attention(model: ModelShape, recipe: Recipe, phase: str, batch: int, context: int, compute_format: str) -> Work:
    """Attention of every layer together: scores and weighted values, tiled so that the scores stay on the chip.

    A decode step reads `context` cached tokens a sequence; prefill makes them, causally unless the model is an encoder.
    Each cached value takes part in one multiply-add per query, in as many heads as share it.
    """
    n_values = batch * model.kv_bytes(context, 1)  # cached keys and values, sliding windows cut
    n_queries = (
        1.0 if phase == "decode" else (context + 1) / 2 if model.has_head else context
    )  # queries that use each value
    narrow = recipe.kv_format != "none"
    naive = narrow and recipe.kv_path == "dequantize_then_matmul"
    wide = width_bytes(compute_format)
    return Work(
        flop=2 * n_values * n_queries * model.n_heads / model.n_kv_heads,
        arithmetic_format=compute_format,
        rows=batch if phase == "decode" else batch * context,
        kv_bytes=n_values * (KV_BITS[recipe.kv_format] / 8 if narrow else wide),
        dequantized_values=n_values if narrow else 0.0,
        dequantized_bytes=2 * n_values * wide if naive else 0.0,
        converted_at_once=n_values / (2 * model.n_layers),
        n_kernels=model.n_layers * KERNELS_PER_KV_CONVERSION if naive else 0,
        path="fused" if narrow and not naive else "dense",
    )


def step(
    model: ModelShape, recipe: Recipe, *, phase: str, batch: int, context: int, compute_format: str
) -> Iterator[tuple[Work, float]]:
    """(work, how many times) of one decode step, or of the prefill of `context` tokens a sequence with one output.

    Raises ValueError for another phase and for sizes below 1.
    """
    if phase not in PHASES or min(batch, context) < 1:
        raise ValueError(f"phase {phase!r}, batch {batch}, context {context}: phase is one of {PHASES}, sizes are >= 1")
    rows = batch if phase == "decode" else batch * context
    plain = {kind: shape for kind, shape in model.layer_matrices.items() if kind in "qkvo" or not model.n_experts}
    for (out_features, in_features), n_matrices in Counter(plain.values()).items():
        yield linear(out_features, in_features, rows, recipe, compute_format), n_matrices * model.n_layers
    for kind in model.layer_matrices.keys() - plain.keys():
        yield from _expert_products(model, recipe, kind, rows, compute_format)
    yield attention(model, recipe, phase, batch, context, compute_format), 1
    if model.has_head:
        head = Recipe("head", weight_format=compute_format)
        if recipe.head_format:
            head = Recipe("head", weight_format=recipe.head_format, kernel_path="fused")
        yield linear(model.vocab, model.hidden, batch, head, compute_format), 1
    yield _elementwise(model, rows, recipe.engine, compute_format), model.n_layers


def _expert_products(
    model: ModelShape, recipe: Recipe, kind: str, rows: int, compute_format: str
) -> Iterator[tuple[Work, float]]:
    """One MLP matrix of a mixture, over all layers: rows are spread evenly over the distinct experts they reach."""
    expert = replace(model, intermediate=model.expert_intermediate or model.intermediate).layer_matrices[kind]
    n_sparse = model.n_layers - model.n_dense_layers
    distinct = distinct_experts(model.n_experts, model.n_active_experts, rows)
    yield linear(*expert, rows * model.n_active_experts / distinct, recipe, compute_format), distinct * n_sparse
    if model.n_shared_experts:
        yield linear(*expert, rows, recipe, compute_format), model.n_shared_experts * n_sparse
    if model.n_dense_layers:
        yield linear(*model.layer_matrices[kind], rows, recipe, compute_format), model.n_dense_layers


def _elementwise(model: ModelShape, rows: int, engine: str, compute_format: str) -> Work:
    """Norms, activation, RoPE and residuals of one layer: each kernel reads and writes the residual stream once."""
    n_kernels = KERNELS_PER_LAYER[engine] - 4 - model.mlp_matrices
    return Work(activation_bytes=2 * n_kernels * rows * model.hidden * width_bytes(compute_format), n_kernels=n_kernels)


def distinct_experts(n_experts: int, n_active: int, rows: int) -> float:
    """Expected number of experts that `rows` tokens reach, each choosing k of E evenly: E (1 - (1 - k/E)^rows)."""
    return n_experts * (1 - (1 - n_active / n_experts) ** rows)


def decode_read_bytes(model: ModelShape, recipe: Recipe, *, batch: int, context: int, compute_format: str) -> float:
    """Bytes that one decode step reads: every matmul weight as stored (head included) and every row's KV cache."""
    works = step(model, recipe, phase="decode", batch=batch, context=context, compute_format=compute_format)
    return sum(work.read_bytes * times for work, times in works)


def stored_bytes(model: ModelShape, recipe: Recipe, *, batch: int, context: int, compute_format: str) -> float:
    """Bytes that must lie in memory: matrices as stored, tables at full width, KV cache. Working space is left out."""
    matrices = model.stored_matmul_parameters - model.head_parameters
    tables = model.n_parameters - matrices
    kv_width = KV_BITS[recipe.kv_format] / 8 or width_bytes(compute_format)
    per_weight = width_bytes(compute_format) if recipe.kernel_path == "stored_dense" else recipe.bytes_per_weight
    tables_bytes = tables * width_bytes(compute_format)
    if recipe.head_format:  # a copy beside a tied table, or instead of an untied head
        kept = width_bytes(recipe.head_format) - (0 if model.tied_embeddings else width_bytes(compute_format))
        tables_bytes += model.head_parameters * kept
    return matrices * per_weight + tables_bytes + batch * model.kv_bytes(context, kv_width)


def crossover_tokens(weight_bytes: float, kv_bytes_per_token: float, batch: int) -> float:
    """Context length at which a decode step reads as many bytes of KV cache as of weights."""
    return weight_bytes / (batch * kv_bytes_per_token)
