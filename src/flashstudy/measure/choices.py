"""The kernels chosen for a recipe on this machine, kept beside the machine card: choosing takes seconds each time.

A choice made while other work ran is used once and not kept. The file is named after the machine's fingerprint, so
another processor, torch or thread limit chooses anew, as does any change of a kernel; `refresh` does so at will.
"""

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from flashstudy.compress import linear, packed, probes, products, sparse, stores
from flashstudy.compress.cache import keep
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
        return kept[key]
    chosen, contended = kernels.fill(recipe, shapes=shapes, budget_s=BUDGET_S, n_threads=n_threads)
    if not contended:
        entries = {key: chosen.to_json() for key, chosen in (_load(path) | {key: chosen}).items()}
        keep(json.dumps(entries, indent=1), path)
    return chosen


def _key(recipe: Recipe, shapes: Sequence[tuple[int, int]], n_threads: int | None) -> str:
    """Digest of what the choice depends on: recipe, threads, shapes by their share, kernels with their libraries.

    How many layers there are does not matter, only how often each shape occurs among them.
    """
    counts = Counter(map(tuple, shapes))
    unit = math.gcd(*counts.values())
    facts = [recipe.to_json(), n_threads, sorted((shape, count // unit) for shape, count in counts.items())]
    facts += [machine.card().standard_dtype, version("torchao"), probes.ERROR_BOUNDS]
    facts += [dataclasses.astuple(info) for info in KERNELS]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for module in (linear, stores, products, packed, sparse, kernels):
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()[:16]


def _load(path: Path) -> dict[str, Recipe]:
    """The choices kept; none where the file is missing or damaged."""
    try:
        return {key: Recipe.from_json(text) for key, text in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
