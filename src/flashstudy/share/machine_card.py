"""The machine that a run was measured on, from its provenance: one line for a page, a card for the site.

Provenance may come from elsewhere and be incomplete: what it lacks is left out, what it holds is scrubbed and escaped
by the template.
"""

from typing import Any

from flashstudy.facts.units import format_bytes
from flashstudy.share.scrub import scrub


def line(provenance: dict[str, Any]) -> str:
    """ "AMD EPYC 7R13 · 2 threads", "unknown machine" where provenance does not tell."""
    card = _card(provenance)
    threads = _threads(provenance, card)
    parts = [_name(card), f"{threads} thread{'s' if threads != '1' else ''}" if threads else ""]
    return " · ".join(part for part in parts if part) or "unknown machine"


def rows(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) pairs of the card, measured rates with their units."""
    card = _card(provenance)
    found = [
        ("Processor", _name(card)),
        ("Cores", _cores(card)),
        ("Instructions", " ".join(map(str, card.get("simd") or []))),
        ("Memory", _bytes(card.get("memory_limit_bytes"))),
        ("Last-level cache", _bytes(card.get("llc_bytes"))),
        ("GPU", str((card.get("gpu") or {}).get("name", "none") if isinstance(card.get("gpu"), dict) else "none")),
        ("Threads timed", _threads(provenance, card)),
        ("Read bandwidth, measured", _rates(card.get("read_bytes_per_s"), "thread", _gb_per_s)),
        ("Matrix products, measured", _rates(card.get("gemm_flop_per_s"), "", _tflop_per_s)),
        ("Standard's number format", _standard(card)),
        ("Card measured", str(card.get("measured_at", ""))[:10] + (", machine busy" if card.get("contended") else "")),
    ]
    return [(label, scrub(value)) for label, value in found if value]


def software(provenance: dict[str, Any]) -> str:
    """The versions that can move a number, in one line."""
    versions = provenance.get("versions") or {}
    names = ("python", "torch", "transformers", "torchao", "flashstudy")
    return scrub(" · ".join(f"{name} {versions[name]}" for name in names if versions.get(name)))


def _card(provenance: dict[str, Any]) -> dict[str, Any]:
    machine = provenance.get("machine")
    card = machine.get("card") if isinstance(machine, dict) else None
    return card if isinstance(card, dict) else {}


def _name(card: dict[str, Any]) -> str:
    return scrub(" ".join(str(card.get("cpu_model") or "").split()))


def _cores(card: dict[str, Any]) -> str:
    if not card.get("physical_cores"):
        return ""
    return f"{card['physical_cores']} physical, {card.get('usable_cpus', '?')} CPUs usable, {card.get('arch', '')}"


def _threads(provenance: dict[str, Any], card: dict[str, Any]) -> str:
    """Threads that were timed: those asked for, else the card's choice; torch's own setting where neither is known."""
    used = provenance.get("n_threads")
    used = used if isinstance(used, dict) else {"parameter": used}
    return str(used.get("parameter") or card.get("n_threads") or used.get("torch") or "")


def _standard(card: dict[str, Any]) -> str:
    if not card.get("standard_dtype"):
        return ""
    return f"{card['standard_dtype']} (bf16 is {'fast' if card.get('fast_bf16') else 'slow'} here)"


def _rates(rates, word: str, show) -> str:
    if not isinstance(rates, dict):
        return ""
    plural = {True: f" {word}", False: f" {word}s"} if word else {True: "", False: ""}
    numbers = [(str(key), rate) for key, rate in rates.items() if isinstance(rate, int | float)]
    return ", ".join(f"{show(rate)} {'with ' if word else 'in '}{key}{plural[key == '1']}" for key, rate in numbers)


def _gb_per_s(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def _tflop_per_s(rate: float) -> str:
    return f"{rate / 1e12:.2f} TFLOP/s"


def _bytes(value) -> str:
    return format_bytes(value) if isinstance(value, int | float) and value > 0 else ""
