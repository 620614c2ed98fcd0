"""The kernels chosen for a recipe on this machine, kept beside the machine card: choosing takes seconds each time.

A choice made while other work ran is used once and not kept. The file is named after the machine's fingerprint, so
another processor, torch or thread limit chooses anew; `refresh` does so at will.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from flashstudy.compress.kernel_table import KERNELS
from flashstudy.facts.recipes import Recipe

from . import host, kernels, machine

BUDGET_S = 2.0


def best_kernels(
    recipe: Recipe, *, shapes: Sequence[tuple[int, int]], n_threads: int | None = None, refresh: bool = False
) -> Recipe:
    """`kernels.fill` for layers of these shapes, or what it chose earlier on this machine."""
    path = machine.cache_folder() / f"kernels-{machine.fingerprint(host.read())}.json"
    kept, key = _load(path), _key(recipe, shapes, n_threads)
    if key in kept and not refresh:
        return Recipe.from_json(kept[key])
    chosen, contended = kernels.fill(recipe, shapes=shapes, budget_s=BUDGET_S, n_threads=n_threads)
    if not contended:
        machine.write_in_one_step(json.dumps(_load(path) | {key: chosen.to_json()}, indent=1), path)
    return chosen


def _key(recipe: Recipe, shapes: Sequence[tuple[int, int]], n_threads: int | None) -> str:
    """Digest of everything that the choice depends on, this package's own kernels included."""
    table = [dataclasses.astuple(info) for info in KERNELS]
    facts = [recipe.to_json(), sorted(Counter(map(tuple, shapes)).items()), n_threads, table]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _load(path: Path) -> dict[str, str]:
    """The choices kept; none where the file is missing or damaged."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
