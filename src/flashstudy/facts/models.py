"""Shapes of transformers: how many parameters they hold, multiply and cache.

Counts are exact for the families that `from_config` knows, so they can be held against a checkpoint's tensors. A
config.json is parsed here, without transformers; a family that the formulas do not cover is refused, not approximated.
"""

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from flashstudy.facts import checkout

BIASES = ("none", "qkv", "all")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. mlp_matrices: 3 with a gate, 2 without. Experts of a mixture replace the MLP of a layer.

    attention_bias: which projections have one. norms_per_layer: of width `hidden`. qk_norm: two more of width head_dim.
    sliding_window: positions that n_sliding_layers of the layers cache at most. other_parameters: positions, token
    types and poolers. has_head False: an encoder without output head.
    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    mlp_matrices: int
    tied_embeddings: bool
    n_experts: int = 0
    n_active_experts: int = 0
    expert_intermediate: int = 0
    n_shared_experts: int = 0
    n_dense_layers: int = 0
    attention_bias: str = "none"
    mlp_bias: bool = False
    norm_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: bool = False
    sliding_window: int = 0
    n_sliding_layers: int = 0
    other_parameters: int = 0
    has_head: bool = True

    def __post_init__(self) -> None:
        names = ("n_layers", "hidden", "n_heads", "n_kv_heads", "head_dim", "intermediate", "vocab")
        sizes = {name: getattr(self, name) for name in names}
        if min(sizes.values()) <= 0 or self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.name}: sizes must be positive and KV heads must divide heads, got {sizes}")
        if self.mlp_matrices not in (2, 3) or self.attention_bias not in BIASES:
            raise ValueError(f"{self.name}: mlp_matrices {self.mlp_matrices}, attention_bias {self.attention_bias!r}")
        if not 0 <= self.n_active_experts <= self.n_experts or (self.n_experts > 0) != (self.n_active_experts > 0):
            raise ValueError(f"{self.name}: {self.n_active_experts} of {self.n_experts} experts cannot be active")

    @property
    def n_parameters(self) -> int:
        """Unique parameters: a tied head counts once."""
        return self._count(self.n_experts)

    @property
    def n_active_parameters(self) -> int:
        """Parameters that one token uses: of the experts only the active ones, of the embedding the whole table."""
        return self._count(self.n_active_experts)

    @property
    def matmul_parameters(self) -> int:
        """Weights that take part in one token's products: output head included, embedding look-up not.

        Times the stored bytes per weight this is what a decode step reads of the model at batch 1.
        """
        return self._layer_weights(self.n_active_experts) + self.head_parameters

    @property
    def stored_matmul_parameters(self) -> int:
        """Like `matmul_parameters` with every expert: what has to lie in memory."""
        return self._layer_weights(self.n_experts) + self.head_parameters

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, tied or not."""
        return self.vocab * self.hidden if self.has_head else 0

    @property
    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of one dense layer by kind, as (out_features, in_features)."""
        query, key_value = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        attention = {"q": (query, self.hidden), "k": (key_value, self.hidden), "v": (key_value, self.hidden)}
        attention["o"] = (self.hidden, query)
        gate = {"gate": (self.intermediate, self.hidden)} if self.mlp_matrices == 3 else {}
        return attention | gate | {"up": (self.intermediate, self.hidden), "down": (self.hidden, self.intermediate)}

    def kv_bytes_per_token(self, bytes_per_value: float) -> float:
        """Bytes of keys and values that one more token adds, as long as no sliding window is full."""
        return self.n_layers * self._kv_values * bytes_per_value

    def kv_bytes(self, context: int, bytes_per_value: float) -> float:
        """Bytes of the keys and values of one sequence of `context` tokens; sliding layers keep their window only."""
        window = min(context, self.sliding_window) if self.sliding_window else context
        full = self.n_layers - self.n_sliding_layers
        return (full * context + self.n_sliding_layers * window) * self._kv_values * bytes_per_value

    @property
    def _kv_values(self) -> int:
        return 2 * self.n_kv_heads * self.head_dim

    def _layer_weights(self, n_experts: int) -> int:
        matrices = self.layer_matrices
        attention = sum(rows * cols for kind, (rows, cols) in matrices.items() if kind in "qkvo")
        mlp = self.mlp_matrices * self.hidden * self.intermediate
        if not self.n_experts:
            return self.n_layers * (attention + mlp)
        expert = self.mlp_matrices * self.hidden * (self.expert_intermediate or self.intermediate)
        sparse = (n_experts + self.n_shared_experts) * expert + self.n_experts * self.hidden  # the router comes last
        n_sparse = self.n_layers - self.n_dense_layers
        return self.n_layers * attention + self.n_dense_layers * mlp + n_sparse * sparse

    def _count(self, n_experts: int) -> int:
        tables = self.vocab * self.hidden * (1 if self.tied_embeddings or not self.has_head else 2)
        norms = (self.norms_per_layer * self.n_layers + 1) * self.hidden * (2 if self.norm_bias else 1)
        query_key_norms = self.n_layers * 2 * self.head_dim if self.qk_norm else 0
        biases = self.n_layers * self._layer_biases()
        return self._layer_weights(n_experts) + tables + norms + query_key_norms + biases + self.other_parameters

    def _layer_biases(self) -> int:
        rows = {kind: out_features for kind, (out_features, _) in self.layer_matrices.items()}
        with_bias = {"none": "", "qkv": "qkv", "all": "qkvo"}[self.attention_bias]
        mlp = sum(size for kind, size in rows.items() if kind not in "qkvo") if self.mlp_bias else 0
        return sum(rows[kind] for kind in with_bias) + mlp


# What the layers of a family hold beyond the sizes in its config. "bias": the projections that `attention_bias` adds
# one to, with the family's default for that key. Source: the modeling files of transformers 5.24.
_FAMILIES: dict[str, dict] = {
    "llama": {"bias": ("all", False)},
    "mistral": {},
    "qwen2": {"attention_bias": "qkv"},
    "qwen3": {"bias": ("all", False), "qk_norm": True},
    "phi3": {},
    "granite": {"bias": ("all", False)},
    "glm": {"bias": ("qkv", True)},
    "glm4": {"bias": ("qkv", True), "norms_per_layer": 4},
    "mixtral": {},
    "qwen3_moe": {"bias": ("all", False), "qk_norm": True},
    "bert": {"attention_bias": "all", "mlp_bias": True, "norm_bias": True, "mlp_matrices": 2, "has_head": False},
}


def from_config(config: dict | Path, name: str = "") -> ModelShape:
    """The shape that a transformers config.json describes, given as its dict, its path or its folder.

    Raises ValueError for a family whose parameters these formulas would not count exactly, and for missing sizes.
    """
    if isinstance(config, Path | str):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        config, name = json.loads(path.read_text(encoding="utf-8")), name or path.parent.name
    family = config.get("model_type", "")
    if family not in _FAMILIES:
        raise ValueError(f"model_type {family!r} is not covered; covered are {', '.join(_FAMILIES)}")
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    if missing := [key for key in sizes if key not in config]:
        raise ValueError(f"the config of {name or family} lacks {', '.join(missing)}")
    return ModelShape(
        name=name or config.get("_name_or_path") or family,
        n_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        **_heads(config),
        **_experts(config),
        **_window(config),
        **_details(config),
    )


def _heads(config: dict) -> dict:
    n_heads = config["num_attention_heads"]
    return {
        "n_heads": n_heads,
        "n_kv_heads": config.get("num_key_value_heads") or n_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // n_heads,
    }


def _experts(config: dict) -> dict:
    if config["model_type"] not in ("mixtral", "qwen3_moe"):
        return {}
    if config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"decoder_sparse_step {config['decoder_sparse_step']} is not covered; covered is 1")
    return {
        "n_experts": config.get("num_local_experts") or config.get("num_experts"),
        "n_active_experts": config["num_experts_per_tok"],
        "expert_intermediate": config.get("moe_intermediate_size", 0),
        "n_dense_layers": len(config.get("mlp_only_layers") or ()),
    }


def _window(config: dict) -> dict:
    """The sliding window, unless the config carries a width that it switches off (Qwen2 and Qwen3 do)."""
    n_layers, width = config["num_hidden_layers"], config.get("sliding_window") or 0
    if not width or not config.get("use_sliding_window", True):
        return {}
    kinds = config.get("layer_types") or ["sliding_attention"] * n_layers
    return {"sliding_window": width, "n_sliding_layers": kinds.count("sliding_attention")}


def _details(config: dict) -> dict:
    details = {"mlp_matrices": 3, "mlp_bias": config.get("mlp_bias", False)} | _FAMILIES[config["model_type"]]
    projections, default = details.pop("bias", ("none", False))
    if config.get("attention_bias", default) and projections != "none":
        details["attention_bias"] = projections
    if config["model_type"] == "bert":  # positions, token types and pooler; the embedding's norm stands for a final one
        hidden = config["hidden_size"]
        tables = config["max_position_embeddings"] + config.get("type_vocab_size", 2)
        details["other_parameters"] = tables * hidden + hidden * (hidden + 1)
    return details | {"tied_embeddings": config.get("tie_word_embeddings", config["model_type"] == "bert")}


def load(path: Path | None = None) -> dict[str, ModelShape]:
    """The models of data/models.csv by name."""
    with open(path or checkout.data_dir() / "models.csv", newline="", encoding="utf-8") as lines:
        return {row["name"]: _from_row(row) for row in csv.DictReader(lines)}


def _from_row(row: dict[str, str]) -> ModelShape:
    converters = {int: int, bool: lambda text: text == "yes", str: str}
    fields = ModelShape.__dataclass_fields__
    given = {name: text for name, text in row.items() if name in fields and text != ""}
    return ModelShape(**{name: converters[fields[name].type](text) for name, text in given.items()})
