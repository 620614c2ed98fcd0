"""Smoke runs through the real runner, one per study and test session, and what must hold for every result."""

import functools
import math
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from flashstudy.facts import claims, columns
from flashstudy.runs import records, runner
from flashstudy.share import verdicts


@functools.cache
def run(name: str) -> records.Run:
    """The study's smoke run on the default model; fails with the runner's own reason."""
    results = Path(tempfile.mkdtemp(prefix="smoke-"))
    (outcome,) = runner.run_batch([name], profile="smoke", results=results)
    assert outcome.status == "done", f"{name}: {outcome.status}: {outcome.reason}"
    return records.load(name, results, profile="smoke")


def check_rows(name: str, must_have: list[str]) -> pd.DataFrame:
    """The rows of a smoke run after the checks that hold for every study."""
    result = run(name).result
    columns.check(result)
    assert set(must_have) <= set(result.columns)
    numbers = result.select_dtypes("number")
    assert not np.isinf(numbers.to_numpy(dtype=float, na_value=math.nan)).any(), "infinite values"
    estimates = result[result.estimate.notna()]
    assert (estimates.low <= estimates.estimate).all() and (estimates.estimate <= estimates.high).all()
    if "time_ratio" in result:
        ratios = result[result.time_ratio.notna()]
        assert (ratios.time_ratio > 0).all()
        assert ((ratios.low <= ratios.time_ratio) & (ratios.time_ratio <= ratios.high)).all()
    return result


def check_verdicts(name: str, expected_ids: set[str]) -> pd.DataFrame:
    """The judged claims of a smoke run: allowed words only, and a number for every claim that the study measures."""
    judged = verdicts.judge(run(name).result, claims.select(name)).set_index("claim_id")
    words = {*claims.VERDICTS, claims.NO_STUDY}
    assert set(judged.as_stated) <= words and set(judged.mechanism_here) <= words
    measured = set(judged.index[judged.estimate.notna()])
    assert expected_ids <= measured, f"no number for {expected_ids - measured}"
    return judged
