"""What a notebook's first code cell calls: its parameters, validated, whoever injected them.

papermill only warns about a name that the notebook does not know and goes on with the defaults, and it injects above
the defaults when the `parameters` tag is gone. Both end as a result for other parameters than asked for. The kernel
still holds the injected cell in its history, so `read` compares it with what arrived.
"""

import ast
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

P = TypeVar("P", bound=BaseModel)
INJECTED_HEADER = "# Parameters"  # the first line of the cell that papermill injects


def read(schema: type[P], cell_globals: Mapping[str, Any]) -> P:
    """The study's parameters from a notebook's globals.

    Raises ValueError in one line for a name that is unknown, missing or not in force, and for a value out of bounds.
    """
    injected = _injected(cell_globals.get("In", []))
    for name, value in injected.items():
        if name not in schema.model_fields:
            raise ValueError(unknown_name(schema, name))
        if cell_globals.get(name) != value:
            raise ValueError(
                f"parameter {name} = {value!r} was injected but did not arrive: is the cell tagged 'parameters'?"
            )
    missing = [name for name in schema.model_fields if name not in cell_globals]
    if missing:
        raise ValueError(f"parameters cell lacks {', '.join(missing)}")
    return validate(schema, {name: cell_globals[name] for name in schema.model_fields})


def validate(schema: type[P], values: Mapping[str, Any]) -> P:
    """`values` as the schema's instance; ValueError in one line naming the parameter, its value and what is allowed."""
    try:
        return schema(**values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or schema.__name__
        raise ValueError(f"parameter {place} = {first['input']!r}: {first['msg']}") from None


def unknown_name(schema: type[BaseModel], name: str) -> str:
    """One line that names an unknown parameter, the closest known one and all that are allowed."""
    known = list(schema.model_fields)
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"unknown parameter {name!r}{hint}; allowed: {', '.join(known)}"


def _injected(history: list[str]) -> dict[str, Any]:
    """Names and values that papermill's injected cell assigned, from the kernel's input history."""
    cells = [source for source in history if source.startswith(INJECTED_HEADER)]
    values: dict[str, Any] = {}
    for node in ast.parse(cells[-1]).body if cells else []:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:  # float("nan") is a call; the schema refuses it by its value
                continue
    return values
