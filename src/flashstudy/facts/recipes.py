"""A recipe: everything that makes one variant of a model differ from its standard.

Formats say what is stored, `kernel_path` says how it is multiplied; the same bytes on another path can be ten times
slower, so no recipe is complete without both. A recipe names formats and paths only: it knows no device and no model.
"""

import dataclasses
import json
from dataclasses import dataclass

WEIGHT_BITS = {
    "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "nf4": 4, "int4": 4, "int3": 3, "int2": 2,
}  # fmt: skip
KERNEL_PATHS = (
    "dense", "fused", "dequantize_then_matmul", "native_lowbit", "decomposed_int8", "fallback_dtype", "stored_dense",
    "unknown",
)  # fmt: skip
GRANULARITIES = ("tensor", "channel", "group")
PATTERNS = ("none", "unstructured", "block", "2:4", "channel")
SPARSE_FORMATS = ("dense", "masked", "bitmap", "csr", "bsr", "n_m", "structured")
KV_BITS = {"none": 0, "int8": 8, "fp8": 8, "int4": 4}
KV_PATHS = ("dequantize_then_matmul", "fused", "native_lowbit", "unknown")
ENGINES = ("eager", "compiled", "graph", "cpp")

SCALE_BYTES = 2  # one scale (or zero point) in 16 bits, as torch's packed kernels and GPTQ, AWQ and GGUF files keep it
INDEX_BYTES = 4  # one column or row pointer of CSR and BSR, int32
N_M_INDEX_BITS = 2  # position of a kept weight within its four. Source: CUTLASS, 2:4 metadata


@dataclass(frozen=True)
class Recipe:
    """One variant. Raises ValueError for a word outside the vocabularies above and for combinations that contradict.

    group_size: weights per scale, 0 unless granularity is "group". sparsity: share of zeros. block: (rows, cols), of
    BSR or of the pattern. kv_format "none" keeps the cache in the model's dtype; activation_format "" is that dtype.
    head_format "" leaves a tied output head as it is; any other is that of the copy which is then multiplied.
    """

    name: str
    weight_format: str = "fp32"
    granularity: str = "channel"
    group_size: int = 0
    symmetric: bool = True
    sparsity: float = 0.0
    pattern: str = "none"
    sparse_format: str = "dense"
    kv_format: str = "none"
    kv_path: str = "dense"
    kernel_path: str = "dense"
    kernel: str = ""
    engine: str = "eager"
    activation_format: str = ""
    head_format: str = ""
    block: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        _check_words(self)
        _check_sizes(self)
        _check_paths(self)

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are stored in fewer than 16 bits."""
        return WEIGHT_BITS[self.weight_format] < 16

    @property
    def weight_bytes(self) -> float:
        """Bytes of one stored value, scales and indices left out."""
        return WEIGHT_BITS[self.weight_format] / 8

    @property
    def bytes_per_weight(self) -> float:
        """Stored bytes over weights of a 4096 × 4096 matrix, scales and indices included."""
        return sum(self.stored_bytes(4096, 4096)) / 4096**2

    @property
    def stored_density(self) -> float:
        """Share of the weights whose value is stored: all if dense or masked, whole blocks in BSR, else the kept.

        Unstructured zeros rarely empty a block: 1 - (1 - density)^(rows · cols) of the blocks stay.
        """
        density = 1 - self.sparsity
        if self.sparse_format in ("dense", "masked"):
            return 1.0
        if self.sparse_format == "bsr" and self.pattern == "unstructured":
            return 1 - self.sparsity ** (self.block[0] * self.block[1])
        return density

    def stored_bytes(self, out_features: int, in_features: int) -> tuple[float, float, float]:
        """(values, indices, scales) in bytes of one weight [out_features, in_features]."""
        n_weights = out_features * in_features
        values = n_weights * self.stored_density * self.weight_bytes
        scales = self._n_scales(out_features, n_weights) * SCALE_BYTES
        return values, self._index_bytes(out_features, in_features), scales

    def _index_bytes(self, out_features: int, in_features: int) -> float:
        n_weights = out_features * in_features
        n_stored = n_weights * self.stored_density
        match self.sparse_format:
            case "masked":
                return n_weights  # one byte each, as torch keeps booleans
            case "structured":
                return INDEX_BYTES * (out_features * self.stored_density + in_features)
            case "bitmap":
                return n_weights / 8
            case "csr":
                return INDEX_BYTES * (n_stored + out_features + 1)
            case "bsr":
                rows, cols = self.block
                return INDEX_BYTES * (n_stored / (rows * cols) + out_features / rows + 1)
            case "n_m":
                return n_stored * N_M_INDEX_BITS / 8
        return 0.0

    def _n_scales(self, out_features: int, n_weights: int) -> float:
        if not self.is_quantized:
            return 0
        n_groups = {"tensor": 1, "channel": out_features, "group": n_weights / max(self.group_size, 1)}
        return n_groups[self.granularity] * (1 if self.symmetric else 2)  # asymmetric: a zero point each

    def to_json(self) -> str:
        """The recipe as one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Recipe":
        """The recipe that `to_json` wrote. Raises ValueError for unknown fields."""
        fields = json.loads(text)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := set(fields) - known:
            raise ValueError(f"unknown recipe fields {sorted(unknown)}; allowed are {sorted(known)}")
        return cls(**{**fields, "block": tuple(fields.get("block", (0, 0)))})


def allowed_kernel_paths(recipe: Recipe) -> tuple[str, ...]:
    """The paths that can multiply what the recipe stores."""
    if recipe.is_quantized:
        return tuple(path for path in KERNEL_PATHS if path != "dense")
    if recipe.sparse_format != "dense":
        return ("fused", "dequantize_then_matmul", "fallback_dtype", "unknown")  # "dequantize" decompresses here
    return ("dense", "fallback_dtype", "stored_dense", "unknown")


def _check_words(recipe: Recipe) -> None:
    allowed = {
        "weight_format": WEIGHT_BITS, "activation_format": ("", *WEIGHT_BITS), "granularity": GRANULARITIES,
        "head_format": ("", "int8"), "pattern": PATTERNS, "sparse_format": SPARSE_FORMATS, "kv_format": KV_BITS,
        "kernel_path": KERNEL_PATHS, "engine": ENGINES,
    }  # fmt: skip
    for field, words in allowed.items():
        if getattr(recipe, field) not in words:
            raise ValueError(f"{field} {getattr(recipe, field)!r} is not one of {', '.join(map(repr, words))}")


def _check_sizes(recipe: Recipe) -> None:
    if (recipe.group_size > 0) != (recipe.granularity == "group") or recipe.group_size < 0:
        raise ValueError(f"group_size {recipe.group_size} does not go with granularity {recipe.granularity!r}")
    if not 0 <= recipe.sparsity < 1:
        raise ValueError(f"sparsity {recipe.sparsity} is not in [0, 1)")
    if (recipe.sparsity > 0) != (recipe.pattern != "none"):
        raise ValueError(f"sparsity {recipe.sparsity} does not go with pattern {recipe.pattern!r}")
    if (min(recipe.block) > 0) != (recipe.sparse_format == "bsr" or recipe.pattern == "block"):
        raise ValueError(f"block {recipe.block} does not go with {recipe.pattern!r} stored as {recipe.sparse_format!r}")
    if recipe.pattern == "2:4" and recipe.sparsity != 0.5:
        raise ValueError(f"pattern '2:4' keeps half of the weights, not sparsity {recipe.sparsity}")


def _check_paths(recipe: Recipe) -> None:
    paths = allowed_kernel_paths(recipe)
    if recipe.kernel_path not in paths:
        stored = f"{recipe.weight_format} weights stored as {recipe.sparse_format!r}"
        raise ValueError(f"kernel_path {recipe.kernel_path!r} cannot multiply {stored}; allowed are {', '.join(paths)}")
    kv_paths = ("dense",) if recipe.kv_format == "none" else KV_PATHS
    if recipe.kv_path not in kv_paths:
        allowed = ", ".join(kv_paths)
        raise ValueError(
            f"kv_path {recipe.kv_path!r} does not go with kv_format {recipe.kv_format!r}; allowed: {allowed}"
        )


def standard(weight_format: str = "fp32") -> Recipe:
    """The uncompressed model in one float format on the best dense path."""
    return Recipe(name="standard", weight_format=weight_format)


ARTICLE_FLASH = Recipe(
    name="ARTICLE_FLASH",
    weight_format="int8",
    sparsity=0.5,
    pattern="unstructured",
    sparse_format="bitmap",
    kv_format="int8",
    kv_path="dequantize_then_matmul",
    kernel_path="dequantize_then_matmul",
)
BEST_FLASH = dataclasses.replace(ARTICLE_FLASH, name="BEST_FLASH", kernel_path="unknown", kv_path="unknown")


def elements(recipe: Recipe, base: Recipe | None = None) -> dict[str, Recipe]:
    """Each element of the recipe alone over `base` (by default the fp32 standard), without those it does not use.

    Keys: "weight_format", "sparsity", "kv_format". A path that the element alone does not allow (a low-bit kernel
    without low-bit values) becomes "dense" where the weights are stored dense, else "unknown".
    """
    base = base or standard()
    parts = {
        "weight_format": (
            "weight_format",
            "granularity",
            "group_size",
            "symmetric",
            "activation_format",
            "head_format",
        ),  # fmt: skip
        "sparsity": ("sparsity", "pattern", "sparse_format", "block"),
        "kv_format": ("kv_format", "kv_path"),
    }
    return {
        key: _alone(recipe, base, key, fields)
        for key, fields in parts.items()
        if getattr(recipe, key) != getattr(base, key)
    }


def _alone(recipe: Recipe, base: Recipe, key: str, fields: tuple[str, ...]) -> Recipe:
    changes = {field: getattr(recipe, field) for field in fields}
    changes["name"] = f"{recipe.name}: {key} alone"
    if key == "kv_format":
        return dataclasses.replace(base, **changes)
    alone = dataclasses.replace(base, **changes, kernel_path="unknown")
    paths = allowed_kernel_paths(alone)
    if recipe.kernel_path in paths:
        return dataclasses.replace(alone, kernel_path=recipe.kernel_path, kernel=recipe.kernel)
    return dataclasses.replace(alone, kernel_path="dense") if "dense" in paths else alone
