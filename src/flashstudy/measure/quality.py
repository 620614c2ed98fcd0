"""What a compressed model loses, token by token: likelihood of real text, and how far its predictions move.

Perplexities of single windows range over a factor of three, so only differences on the same tokens mean anything: all
figures here keep one value a token, and `paired_difference` puts an interval on the mean of their differences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from flashstudy.compress.cache import InputError

BATCH_TOKENS = 512  # go through the model at once, in as many windows; a longer window goes alone
CHUNK_ROWS = 256  # positions whose logits exist at once: 50 MB at a vocabulary of 49,152
BLOCK_TOKENS, FEWEST_BLOCKS = 128, 4
N_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over n_tokens tokens and its 95% interval, in the unit of the values."""

    estimate: float
    low: float
    high: float
    n_tokens: int


@dataclass(frozen=True, eq=False)
class Divergence:
    """Two models on the same windows, one value a predicted token [n, window - 1]."""

    kl_nats: Tensor  # KL(a || b) of the whole distributions
    same_top1: Tensor  # bool: is the likeliest token the same?
    nll_a: Tensor
    nll_b: Tensor


@dataclass(frozen=True, eq=False)
class Reference:
    """A model's final hidden states on windows, kept so that several variants can be compared with it at little cost.

    hidden: [rows, hidden] for each batch of windows, in the model's dtype; 2 MB for 1,000 tokens of width 576.
    """

    model: Any
    windows: Tensor
    hidden: list[Tensor]


def remember(model: Any, windows: Tensor) -> Reference:
    """The model's side of later `kl_and_top1` calls on the same windows. InputError for a head that is not plain."""
    _check(model, windows)
    if not _has_plain_head(model.config):
        raise InputError(
            f"{type(model).__name__} changes its logits after the head, so its hidden states do not say them"
        )
    return Reference(model, windows, [_hidden(model, part, None) for part in _batches(windows)])


def reference_nll(reference: Reference) -> Tensor:
    """`token_nll` of a remembered model on its windows."""
    batches = range(len(reference.hidden))
    losses = [_losses(*chunk) for index in batches for chunk in _from_hidden(reference, index)]
    return torch.cat(losses).reshape(len(reference.windows), -1)


def token_nll(model: Any, windows: Tensor, make_cache: Callable[[], Any] | None = None) -> Tensor:
    """Negative log-likelihood in nats of each token after the first of windows [n, window]: fp32 [n, window - 1].

    Each window is scored alone, from its first token on, as it is: no beginning-of-text token is put before it, so the
    first predictions have little context. With `make_cache` keys and values go through a new cache of that kind,
    quantized ones included.
    """
    _check(model, windows)
    losses = [
        torch.cat([_losses(logits, targets) for logits, targets in _predictions(model, part, make_cache)]).reshape(
            len(part), -1
        )
        for part in _batches(windows)
    ]
    return torch.cat(losses)


def kl_and_top1(
    model_a: "Any | Reference",
    model_b: Any,
    windows: Tensor,
    make_cache_a: Callable[[], Any] | None = None,
    make_cache_b: Callable[[], Any] | None = None,
) -> Divergence:
    """KL divergence of b's predictions from a's, agreement of their likeliest tokens, and both likelihoods.

    One pass of each model (of b alone where a is a Reference), so it replaces two calls of `token_nll`. Windows as
    there.
    """
    remembered = model_a if isinstance(model_a, Reference) else None
    _check(remembered.model if remembered else model_a, windows)
    _check(model_b, windows)
    if remembered and not torch.equal(remembered.windows, windows):
        raise ValueError("the reference was remembered on other windows")
    rows = [
        _compare(
            _from_hidden(remembered, index) if remembered else _predictions(model_a, part, make_cache_a),
            _predictions(model_b, part, make_cache_b),
        )
        for index, part in enumerate(_batches(windows))
    ]
    return Divergence(*(torch.cat(column).reshape(len(windows), -1) for column in zip(*rows, strict=True)))


def check_blocks(n_windows: int, window_tokens: int) -> None:
    """ValueError unless windows of this size give `paired_difference` enough blocks: asked before any model runs."""
    n_blocks = n_windows * -(-(window_tokens - 1) // BLOCK_TOKENS)
    if n_blocks < FEWEST_BLOCKS:
        raise ValueError(
            f"n_windows {n_windows} of window_tokens {window_tokens} give {n_blocks} blocks of up to {BLOCK_TOKENS} "
            f"tokens; an interval needs {FEWEST_BLOCKS}, so allowed are {FEWEST_BLOCKS} windows or longer ones"
        )


def paired_difference(a: Tensor, b: Tensor, block: int = BLOCK_TOKENS, seed: int = 0) -> Interval:
    """Mean of a - b over tokens [n, tokens] and its 95% interval, by a block bootstrap.

    Neighboring tokens lose together, so blocks of `block` consecutive tokens of a window are drawn, not tokens; seeded.
    The interval is widened by what a t quantile exceeds a normal one for this number of blocks, because the bootstrap
    of few blocks is too narrow. Raises ValueError for unequal shapes or fewer than 4 blocks.
    """
    if a.shape != b.shape or a.dim() != 2 or not a.numel():
        raise ValueError(f"paired values need equal shapes [n, tokens], got {tuple(a.shape)} and {tuple(b.shape)}")
    difference = (a.double() - b.double()).cpu()
    pieces = [piece for row in difference for piece in row.split(block)]
    if len(pieces) < FEWEST_BLOCKS:
        raise ValueError(f"{len(pieces)} blocks of {block} tokens are too few for an interval: use more windows")
    sums = np.array([piece.sum().item() for piece in pieces])
    sizes = np.array([len(piece) for piece in pieces])
    means = _resampled_means(sums, sizes, np.random.default_rng(seed))
    estimate = float(difference.mean())
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = (float(value) for value in np.percentile(means, [tail, 100 - tail]))
    wider = _small_sample_factor(len(pieces))
    return Interval(
        estimate, estimate - wider * (estimate - low), estimate + wider * (high - estimate), difference.numel()
    )


def _resampled_means(sums: np.ndarray, sizes: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    drawn = generator.integers(0, len(sums), size=(N_RESAMPLES, len(sums)))
    return sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)


def _small_sample_factor(n_blocks: int) -> float:
    quantile = 0.5 + CONFIDENCE / 2
    return float(special.stdtrit(n_blocks - 1, quantile) / special.ndtri(quantile) * np.sqrt(n_blocks / (n_blocks - 1)))


def _batches(windows: Tensor) -> tuple[Tensor, ...]:
    return windows.split(max(1, BATCH_TOKENS // windows.shape[1]))


def _check(model: Any, windows: Tensor) -> None:
    if model.get_output_embeddings() is None:
        raise InputError(f"{type(model).__name__} has no language head, so it has no next-token likelihood")
    if windows.dim() != 2 or windows.shape[1] < 2 or windows.dtype != torch.long:
        raise ValueError(f"windows are int64 token ids [n, window >= 2], got {windows.dtype} {list(windows.shape)}")
    n_tokens = model.get_input_embeddings().weight.shape[0]
    if windows.numel() and int(windows.max()) >= n_tokens:
        raise ValueError(f"token id {int(windows.max())} is outside the model's vocabulary of {n_tokens}")


@torch.inference_mode()
def _predictions(model: Any, windows: Tensor, make_cache: Callable[[], Any] | None):
    """(logits fp32 [rows, vocabulary], next tokens [rows]) of windows, CHUNK_ROWS positions at a time."""
    targets = windows[:, 1:].flatten().to(model.device)
    if _has_plain_head(model.config):
        yield from _through_head(model, _hidden(model, windows, make_cache), targets)
    else:
        yield model(**_inputs(model, windows, make_cache)).logits[:, :-1].flatten(0, 1).float(), targets


def _inputs(model: Any, windows: Tensor, make_cache: Callable[[], Any] | None) -> dict[str, Any]:
    cache = make_cache() if make_cache else None
    return dict(input_ids=windows.to(model.device), cache=cache, use_cache=cache is not None)


@torch.inference_mode()
def _hidden(model: Any, windows: Tensor, make_cache: Callable[[], Any] | None) -> Tensor:
    """Hidden states [rows, hidden] in front of the head, one for each predicted token."""
    return model.get_decoder()(**_inputs(model, windows, make_cache)).last_hidden_state[:, :-1].flatten(0, 1)


@torch.inference_mode()
def _through_head(model: Any, hidden: Tensor, targets: Tensor):
    head = model.get_output_embeddings()
    for rows, wanted in zip(hidden.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
        yield head(rows).float(), wanted


def _from_hidden(reference: Reference, index: int):
    targets = _batches(reference.windows)[index][:, 1:].flatten().to(reference.model.device)
    return _through_head(reference.model, reference.hidden[index], targets)


def _has_plain_head(config: Any) -> bool:
    """Are the logits the head's output as it is? Some families scale or cap them inside the model's forward."""
    text = config.get_text_config()
    neutral = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}
    return all(getattr(text, name, value) in (value, None) for name, value in neutral.items())


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def _compare(predictions_a, predictions_b) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four columns of Divergence for one batch of windows."""
    rows = []
    for (logits_a, targets), (logits_b, _) in zip(predictions_a, predictions_b, strict=True):
        log_a, log_b = logits_a.log_softmax(-1), logits_b.log_softmax(-1)
        kl_nats = (log_a.exp() * (log_a - log_b)).sum(-1)
        same = log_a.argmax(-1) == log_b.argmax(-1)
        picked = targets[:, None]
        rows.append((kl_nats, same, -log_a.gather(1, picked)[:, 0], -log_b.gather(1, picked)[:, 0]))
    return tuple(torch.cat(column) for column in zip(*rows, strict=True))
