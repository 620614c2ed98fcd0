"""Why is this one model slow, and which single change would help most? The study without a notebook.

What is stored is read from headers, what is in effect from the loaded modules; one decode step is taken apart in
interleaved rounds (`measure.anatomy`), a rule names the cause (`studies.causes`), and the changes that could help are
predicted; the most promising ones are also applied and measured in the same rounds.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from flashstudy.compress import checkpoints, inspect_checkpoint, inspect_model, variants
from flashstudy.compress.checkpoints import Checkpoint, LoadedModel
from flashstudy.compress.folders import read_json
from flashstudy.compress.inspect_checkpoint import Stored
from flashstudy.compress.inspect_model import InEffect
from flashstudy.facts import recipes
from flashstudy.facts.units import format_bytes
from flashstudy.measure import anatomy, machine, memory, steps
from flashstudy.measure.anatomy import KERNELS, LOOP, STEP, Anatomy
from flashstudy.measure.machine import MachineCard
from flashstudy.measure.statistics import Interval
from flashstudy.studies import changes
from flashstudy.studies.causes import Symptoms
from flashstudy.studies.changes import FLOAT_NAMES, Change

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The model itself, its INT8 and INT4 variants beside it (three quarters of 16 bits), caches and working space.
MEMORY_FACTOR = 2.0
UNPACKING_PATHS = ("dequantize_then_matmul", "fallback_dtype")
IN_LOOP = "in the loop: "
BEYOND_LAYERS = "attention, Python and library beyond the linear layers"


@dataclass(frozen=True)
class Decode:
    """One decode step at batch 1. ceiling_bytes_per_s: the fastest plain reader of the same rounds; mbu: share of it.

    parts: shares of the step that sum to 1. not_looped: why the measuring loop does not run this model, or "".
    problem: why the times are not to be believed, "" when they are.
    """

    context: int
    n_threads: int
    step_s: Interval
    weight_bytes: int
    kv_bytes: int
    ceiling_bytes_per_s: Interval
    mbu: Interval
    outside_kernels: Interval
    parts: dict[str, Interval]
    not_looped: str
    problem: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything found about one model; what could not be found is None, with the reason beside it."""

    model: str
    source: str
    stored: Stored
    dtype: str
    in_effect: InEffect | None = None
    not_loaded: str = ""
    decode: Decode | None = None
    not_timed: str = ""
    symptoms: Symptoms | None = None
    changes: tuple[Change, ...] = ()
    took_s: float = 0.0


def examine(
    spec: str,
    *,
    context: int = 512,
    dtype: str = "",
    budget_s: float = 2.0,
    seed: int = 0,
    progress: Callable[[str], object] = lambda line: None,
) -> Diagnosis:
    """The diagnosis of the model that `spec` names (`checkpoints.ALLOWED`). dtype "" loads it as its config says.

    budget_s: seconds for each timed alternative. Raises InputError where there is nothing to look at; a model that
    cannot be loaded, or has no decode step, still gets what its files tell.
    """
    began = time.monotonic()
    if dtype and dtype not in FLOAT_NAMES:
        raise checkpoints.InputError(f"dtype {dtype!r} is not known; allowed: {', '.join(FLOAT_NAMES)}")
    checkpoints.check_spec(spec)
    checkpoint = checkpoints.locate(spec, progress)
    progress(f"reading what is stored in {checkpoint.path.name}")
    stored = inspect_checkpoint.inspect(checkpoint.path)
    found = Diagnosis(checkpoint.name, checkpoint.source, stored, dtype or own_dtype(checkpoint))
    try:
        check_memory(stored, found.dtype, is_gguf=checkpoint.path.is_file())
        progress(f"loading it as {found.dtype}")
        loaded = checkpoints.load_model(spec, dtype=found.dtype, progress=progress)
    except (checkpoints.InputError, MemoryError) as error:
        return dataclasses.replace(found, not_loaded=str(error), took_s=time.monotonic() - began)
    found = dataclasses.replace(found, in_effect=inspect_model.inspect(loaded.model))
    try:
        found = _timed(found, loaded, context, budget_s=budget_s, seed=seed, progress=progress)
    except ValueError as error:
        found = dataclasses.replace(found, not_timed=str(error))
    return dataclasses.replace(found, took_s=time.monotonic() - began)


def own_dtype(checkpoint: Checkpoint) -> str:
    """The dtype in which transformers loads the checkpoint by itself; a GGUF file is unpacked to float32."""
    if checkpoint.path.is_file():
        return "float32"
    config = read_json(checkpoint.path / "config.json")
    stated = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return stated if stated in FLOAT_NAMES else "float32"


def check_memory(stored: Stored, dtype: str, *, is_gguf: bool) -> None:
    """Raise DoesNotFitError where the model, loaded as `dtype`, would not leave the machine room to work."""
    width = max(BYTES[dtype], 4 if is_gguf else 0)  # a GGUF file becomes float32 first
    needed, allowed = MEMORY_FACTOR * width * stored.n_weights, memory.allowed_bytes()
    if needed > allowed:
        raise memory.DoesNotFitError(
            f"examining it as {dtype} needs about {format_bytes(needed)}, {format_bytes(allowed)} may be used here"
        )


def _timed(found: Diagnosis, loaded: LoadedModel, context: int, *, budget_s: float, seed: int, progress) -> Diagnosis:
    """The diagnosis with what is timed: the step taken apart, and the changes. ValueError where there is no step."""
    if not loaded.is_causal:
        raise ValueError(f"{type(loaded.model).__name__} has no decode step: it does not write token after token")
    context = min(context, getattr(loaded.model.config, "max_position_embeddings", context + 1) - 1)
    standard = variants.build(loaded, recipes.standard(FLOAT_NAMES[found.dtype]))
    progress("choosing kernels for the changes that could help")
    card = machine.card()
    options = list(changes.of_weights(loaded, card, context))
    progress("applying the most promising changes")
    built = {change.name: variants.build(loaded, change.recipe) for change in changes.promising(options)}
    progress("timing one decode step, its parts and what was changed")
    kv_bytes = int(loaded.shape.kv_bytes(context, BYTES[found.dtype]))
    taken = anatomy.measure(
        standard, context=context, read_bytes=found.in_effect.read_bytes + kv_bytes, llc_bytes=card.llc_bytes,
        beside=_beside(built, context, seed), budget_s=budget_s, seed=seed,
    )  # fmt: skip
    decode = _decode(taken, found.in_effect.read_bytes, kv_bytes, context)
    return dataclasses.replace(
        found,
        decode=decode,
        symptoms=_symptoms(found, decode, card),
        changes=_measured(taken, options, changes.of_the_loop(loaded, card, context)),
    )


def _beside(built: dict[str, variants.Variant], context: int, seed: int) -> dict[str, Callable]:
    """Calls of the changed models, through the library and, where it runs, in the measuring loop."""
    calls: dict[str, Callable] = {}
    for name, variant in built.items():
        calls[name] = steps.decode(variant, context=context, seed=seed)
        with contextlib.suppress(ValueError):  # a model that the loop does not run: the anatomy says why
            calls[IN_LOOP + name] = steps.loop(variant, context=context, seed=seed)
    return calls


def _measured(taken: Anatomy, options: list[Change], loop: Change) -> tuple[Change, ...]:
    """All changes, the loop first; those that ran have their measured ratios."""
    done = dict(skipped=taken.not_looped) if taken.not_looped else dict(measured=taken.share(LOOP))
    return (
        dataclasses.replace(loop, **done),
        *(
            dataclasses.replace(one, measured=_share(taken, one.name), in_loop=_share(taken, IN_LOOP + one.name))
            for one in options
        ),
    )


def _share(taken: Anatomy, name: str) -> Interval | None:
    return taken.share(name) if name in taken.rounds.trial.functions else None


def _decode(taken: Anatomy, weight_bytes: int, kv_bytes: int, context: int) -> Decode:
    ceiling = taken.time_s(taken.ceiling)
    rates = (taken.read_bytes / seconds for seconds in (ceiling.estimate, ceiling.high, ceiling.low))
    return Decode(
        context=context,
        n_threads=taken.n_threads,
        step_s=taken.time_s(STEP),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        ceiling_bytes_per_s=Interval(*rates),
        mbu=taken.share(taken.ceiling),
        outside_kernels=taken.difference(STEP, KERNELS),
        parts=taken.parts(),
        not_looped=taken.not_looped,
        problem=taken.problem,
    )


def _symptoms(found: Diagnosis, decode: Decode, card: MachineCard) -> Symptoms:
    """What the rule of causes goes by."""
    n_threads = decode.n_threads if str(decode.n_threads) in card.read_bytes_per_s else None
    flop_per_s = machine.as_hardware(card, n_threads).rate(FLOAT_NAMES[found.dtype])
    flop = 2 * sum(group.n_weights for group in found.in_effect.groups)
    symptoms = Symptoms(
        read=decode.parts["read"],
        kernels=decode.parts["kernels"],
        outside=decode.outside_kernels,
        stored_bits=found.stored.multiplied_bits,
        read_bits=found.in_effect.bits_per_weight,
        weight_share=decode.weight_bytes / (decode.weight_bytes + decode.kv_bytes),
        unpacked=found.in_effect.covered(*UNPACKING_PATHS),
        arithmetic=flop / flop_per_s / decode.step_s.estimate,
        dtype=found.dtype,
        problem=decode.problem,
    )
    return dataclasses.replace(symptoms, outside_name=BEYOND_LAYERS) if decode.not_looped else symptoms
