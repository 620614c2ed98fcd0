"""How long and how wide a study runs: smoke to see that it works, quick by default, full for narrow intervals."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from flashstudy.runs.schema import RefusedError

PROFILES = ("smoke", "quick", "full")
PROFILES_FILE = Path(__file__).with_name("profiles.yaml")
ENTRIES = {"overrides", "expected_s", "wall_s"}


@dataclass(frozen=True)
class Profile:
    """expected_s: what a first run on two cores takes. wall_s: when a run is stopped."""

    name: str
    overrides: dict[str, Any]
    expected_s: float
    wall_s: float


UNLISTED = {"expected_s": 30.0, "wall_s": 600.0}


def load(study: str, profile: str, path: Path = PROFILES_FILE) -> Profile:
    """The profile of one study; a study without an entry runs on its defaults.

    Raises RefusedError for a name that is no profile, ValueError for a malformed file.
    """
    check_name(profile)
    entry = UNLISTED | (_studies(path).get(study, {}).get(profile) or {})
    where = f"{path.name}: {study}: {profile}"
    if unknown := set(entry) - ENTRIES:
        raise ValueError(f"{where}: unknown entries {sorted(unknown)}; allowed: {sorted(ENTRIES)}")
    overrides = entry.get("overrides") or {}
    if profile == "quick" and overrides:
        raise ValueError(f"{where}: the quick profile is the schema's defaults; change them there")
    expected_s, wall_s = (_seconds(entry[name], f"{where}: {name}") for name in ("expected_s", "wall_s"))
    return Profile(profile, dict(overrides), expected_s, wall_s)


def check_name(profile: str) -> None:
    """Refuse a name that is no profile."""
    if profile not in PROFILES:
        raise RefusedError(f"no profile named {profile!r}; allowed: {', '.join(PROFILES)}")


def _seconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{where}: {value!r} is no number of seconds above 0")
    return float(value)


@cache
def _studies(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
