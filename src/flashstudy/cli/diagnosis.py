"""What `flashstudy doctor` prints: the diagnosis of one model as plain text of at most 100 columns, or as JSON."""

import dataclasses
import math
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flashstudy.cli.answers import fail, print_json
from flashstudy.facts.units import format_bytes, format_interval, format_seconds

if TYPE_CHECKING:
    from flashstudy.measure.statistics import Interval
    from flashstudy.studies.changes import Change
    from flashstudy.studies.doctor import Decode, Diagnosis

COLUMNS, INDENT = 100, "  "
PARTS = {
    "read": "reading the bytes",
    "kernels": "kernels beyond reading",
    "loop": "small operations, Python",
    "library": "library around them",
    "rest": "attention, Python, library",
}
BAR = 30  # characters of a bar that stands for the whole step


def doctor(model: str, context: int, dtype: str, as_json: bool) -> int:
    """Print the diagnosis; exit code 0, or 2 with one line for a model that there is nothing to look at."""
    from flashstudy.compress.checkpoints import InputError
    from flashstudy.studies import doctor as study

    try:
        found = study.examine(model, context=context, dtype=dtype, progress=lambda line: print(line, file=sys.stderr))
    except InputError as error:
        return fail(str(error), 2)
    if as_json:
        return print_json(as_object(found))
    print("\n".join(lines(found)))
    return 0


def as_object(found: "Diagnosis") -> dict[str, Any]:
    """The diagnosis as one JSON object; what could not be found is null, with the reason under `not_…`."""
    stored, effect = found.stored, found.in_effect
    return _plain(
        dict(
            model=found.model, source=found.source, dtype=found.dtype,
            stored=dataclasses.asdict(stored) | dict(
                n_bytes=stored.n_bytes, n_weights=stored.n_weights, bits_per_weight=stored.bits_per_weight,
                quantized_share=stored.quantized_share,
            ),
            in_effect=effect and dataclasses.asdict(effect) | dict(
                read_bytes=effect.read_bytes, bits_per_weight=effect.bits_per_weight
            ),
            not_loaded=found.not_loaded, decode=found.decode and dataclasses.asdict(found.decode),
            not_timed=found.not_timed, **_verdict(found),
            changes=[
                dataclasses.asdict(one) | dict(kernel=_kernel(one), contradicted=one.contradicted)
                for one in found.changes
            ],
            took_s=found.took_s,
        )
    )  # fmt: skip


def _verdict(found: "Diagnosis") -> dict[str, Any]:
    """Keys cause, causes, conclusive and best_change; null where nothing was timed or, the last, on a busy machine."""
    from flashstudy.studies import causes, changes

    if found.symptoms is None:
        return dict(cause=None, causes=[], conclusive=False, best_change=None)
    best = None if found.symptoms.problem else changes.helpful(found.changes)
    return dict(
        cause=dataclasses.asdict(causes.likely(found.symptoms)),
        causes=[dataclasses.asdict(one) for one in causes.causes(found.symptoms)],
        conclusive=causes.is_conclusive(found.symptoms),
        best_change=best and dict(name=best.name, is_sure=best.is_sure),
    )


def _plain(value: Any) -> Any:
    """The value with what JSON has no word for (infinities, NaN) as null."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines(found: "Diagnosis") -> Iterator[str]:
    """The diagnosis for a person, line by line."""
    yield from _wrapped(f"{found.model} ({found.source})", "")
    yield from _stored(found)
    yield from _in_effect(found)
    if found.decode is not None:
        yield from _decode(found.decode)
        yield from _causes(found)
        yield from _changes(found)
    elif found.not_timed:
        yield from ("", *_wrapped(f"NOT TIMED: {found.not_timed}", ""))
    yield from ("", f"Took {format_seconds(found.took_s)}.")


def _stored(found: "Diagnosis") -> Iterator[str]:
    stored = found.stored
    method = f" quantized by {stored.method}" if stored.method else ""
    bits = f"{stored.bits_per_weight:.1f} bits a weight with scales"
    share = f"{_percent(stored.quantized_share)} of the weights are quantized"
    yield ""
    yield from _wrapped(
        f"STORED ON DISK: {stored.container}{method}, {format_bytes(stored.n_bytes)}, {bits}; {share}", ""
    )
    for one in stored.formats:
        kind = "quantized" if one.quantized else "plain"
        share = f"{_percent(one.n_weights / stored.n_weights)} of the weights" if one.n_weights else ""
        tensors = f"{one.n_tensors} tensor{'s' if one.n_tensors > 1 else ' '}"
        yield f"  {one.name:30} {kind:9} {tensors:>14} {format_bytes(one.n_bytes):>9}  {share}".rstrip()


def _in_effect(found: "Diagnosis") -> Iterator[str]:
    effect = found.in_effect
    yield ""
    if effect is None:
        yield from _wrapped(f"NOT LOADED: {found.not_loaded}", "")
        return
    dtypes = ", ".join(f"{name} {format_bytes(n_bytes)}" for name, n_bytes in effect.dtype_bytes.items())
    yield f"IN EFFECT after loading: {dtypes}; {effect.bits_per_weight:.1f} bits a multiplied weight"
    for group in effect.groups:
        kind = f"{group.n_layers} {group.kind}" + (", tied to the embedding" if group.tied else "")
        path = group.kernel_path + (f" ({group.kernel})" if group.kernel not in ("", group.kernel_path) else "")
        share = f"{_percent(group.share)} of the multiplied weights"
        yield f"  {kind:34} {group.weight_format:9} path {path}, {share}"
    yield from _wrapped(_difference(found))


def _difference(found: "Diagnosis") -> str:
    """What loading did to the number formats, in one sentence."""
    stored, read = found.stored.multiplied_bits, found.in_effect.bits_per_weight
    if read > 1.05 * stored and found.stored.quantized_share:
        what = "Unpacked at load, as transformers does without a kernel for the format"
    elif read > 1.05 * stored:
        what = "Widened at load"
    else:
        return "Read as it is stored." if read > 0.95 * stored else "Narrowed at load."
    return f"{what}: {stored:.1f} bits a weight are stored, {read:.1f} lie in memory and are read at every step."


def _decode(decode: "Decode") -> Iterator[str]:
    threads = f"{decode.n_threads} thread{'s' if decode.n_threads > 1 else ''}"
    rate = (value / 1e9 for value in dataclasses.astuple(decode.ceiling_bytes_per_s))
    step_ms = (value * 1e3 for value in dataclasses.astuple(decode.step_s))
    total = decode.weight_bytes + decode.kv_bytes
    yield ""
    yield f"ONE DECODE STEP (measured: {threads}, batch 1, {decode.context} tokens of context; 95% intervals)"
    yield f"  time of a step      {format_interval(*step_ms)} ms"
    yield (
        f"  bytes it must read  {format_bytes(total)}: weights {format_bytes(decode.weight_bytes)}, "
        f"keys and values {format_bytes(decode.kv_bytes)}"
    )
    yield f"  memory bandwidth    {_shares(decode.mbu)} of the {format_interval(*rate)} GB/s that a plain read reaches"
    yield f"  outside kernels     {_shares(decode.outside_kernels)} of the step"
    yield "  where the time goes"
    for name, share in decode.parts.items():
        bar = "█" * max(0, round(BAR * share.estimate))
        yield f"    {PARTS[name]:28} {_shares(share):>18}  {bar}".rstrip()
    if decode.not_looped:
        yield from _wrapped(f"Not taken apart further: {decode.not_looped}.")


def _causes(found: "Diagnosis") -> Iterator[str]:
    from flashstudy.studies import causes

    symptoms = found.symptoms
    first = causes.likely(symptoms)
    yield ""
    if symptoms.problem:
        yield from _wrapped(f"INCONCLUSIVE: the machine was busy ({symptoms.problem}). Try again when it is quiet.", "")
    label = "LIKELY CAUSE" if causes.is_conclusive(symptoms) else "POSSIBLE CAUSE"
    yield from _wrapped(f"{label}: {first.text}, {_shares(first.share)} of the step", "")
    others = sorted(causes.causes(symptoms), key=lambda one: one.name == causes.REMAINDER)
    for other in others:
        if other.name != first.name and other.share.estimate >= causes.WORTH / 3:
            label = "not explained" if other.name == causes.REMAINDER else "also"
            yield from _wrapped(f"{label}: {other.text}, {_shares(other.share)} of the step")


def _changes(found: "Diagnosis") -> Iterator[str]:
    from flashstudy.studies import changes

    best = changes.helpful(found.changes)
    told = best.name if best else "nothing that was measured here"
    doubt = "" if best is None or best.is_sure else ", probably: its interval reaches 1"
    yield ""
    yield f"WHAT WOULD HELP MOST: {'inconclusive' if found.symptoms.problem else told + doubt}"
    yield f"  {'time of a step after / now':38} {'predicted':>18}  {'measured':>17}  {'in that loop too':>17}"
    for one in found.changes:
        if one.skipped:
            yield from _wrapped(f"{one.name}: not here, {one.skipped}")
            continue
        numbers = f"{_interval(one.predicted):>18}  {_interval(one.measured):>17}  {_interval(one.in_loop):>17}"
        yield f"  {one.name:38} {numbers}".rstrip()
        if one.contradicted:
            yield "    here the measurement lies outside the prediction: believe the measurement"
    for one in found.changes:
        if one.measured is not None:
            kernel = f" (kernel {_kernel(one)})" if _kernel(one) else ""
            yield from _wrapped(f"Quality, {one.name}{kernel}: {one.quality}.")
    if found.stored.container == "GGUF":
        yield from _wrapped("Not measured here: a runtime that multiplies GGUF blocks as they are stored (llama.cpp).")


def _kernel(change: "Change") -> str:
    return change.recipe.kernel if change.recipe else ""


def _wrapped(text: str, indent: str = INDENT) -> list[str]:
    """The text in lines of at most COLUMNS, the first one after `indent`."""
    return textwrap.wrap(" ".join(text.split()), COLUMNS, initial_indent=indent, subsequent_indent=INDENT)


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 or 0.99 < share < 1 else f"{share:.0%}"


def _shares(share: "Interval") -> str:
    """A share with its interval: "62% [61, 63]"."""
    return f"{100 * share.estimate:.0f}% [{100 * share.low:.0f}, {100 * share.high:.0f}]".replace("-0%", "0%")


def _interval(ratio: "Interval | None") -> str:
    """A time ratio with its interval: "0.82 [0.77, 0.87]"; a dash for one that was not measured."""
    return "–" if ratio is None else f"{ratio.estimate:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
