"""A study that takes no time, for the tests of the run floor."""

from typing import Annotated, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field


class Params(BaseModel):
    """Every kind of parameter that the suite uses."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: str = Field("toy", min_length=1, description="a text")
    rows: int = Field(3, ge=1, le=100, description="rows of the result")
    tolerance: float = Field(0.5, gt=0, description="a number")
    bits: list[Annotated[int, Field(ge=2, le=16)]] = Field([8, 4], min_length=1, description="a list of numbers")
    kinds: list[str] = Field(["q", "k"], description="a list of texts")
    fast: bool = Field(True, description="a switch")
    level: Literal["low", "high"] = Field("low", description="a choice")
    limit: int | None = Field(None, description="a number or none")
    seed: int = Field(0, ge=0, description="seed")


def run(params: Params, progress=None, evidence=None) -> pd.DataFrame:
    """One row per counted thing."""
    return pd.DataFrame([{"config": f"{params.model} {i}", "time_s": 0.1 * i} for i in range(params.rows)])


def headline(result: pd.DataFrame) -> str:
    """The answer in one sentence."""
    return f"Counted {len(result)} rows."
