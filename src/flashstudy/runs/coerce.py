"""Text from a command line or a YAML file becomes the JSON value that the schema's type calls for.

Guessing by looks breaks parameters elsewhere: a folder named 007 becomes 7, `no` becomes false, 1e-4 stays text.
Here the type of the parameter decides, and text that does not fit it is refused.
"""

import json
import math
import re
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NOTHING = ("", "none", "null")


def coerce(annotation: Any, value: Any) -> Any:
    """`value` with every text in it turned into what `annotation` calls for; other values pass unchanged.

    Raises ValueError where a text cannot stand for the type.
    """
    if isinstance(value, str):
        return from_text(annotation, value)
    item = _item_type(annotation)
    if item is not None and isinstance(value, list):
        return [coerce(item, part) for part in value]
    return value


def from_text(annotation: Any, text: str) -> Any:
    """The JSON value that `text` stands for under `annotation`; ValueError saying what it is not."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return from_text(get_args(annotation)[0], text)
    if origin in (Union, UnionType):
        return _from_choices(get_args(annotation), text)
    if origin is Literal:
        return next((choice for choice in get_args(annotation) if str(choice) == text), text)
    if _item_type(annotation) is not None:
        return _list_from_text(_item_type(annotation), text)
    readers = {str: str, bool: _truth, int: _integer, float: _number}
    return readers.get(annotation, _json)(text)


def _from_choices(choices: tuple[Any, ...], text: str) -> Any:
    if NoneType in choices and text.strip().lower() in NOTHING:
        return None
    typed = [choice for choice in choices if choice is not NoneType]
    for choice in sorted(typed, key=lambda choice: choice is str):  # text fits everything, so it comes last
        try:
            return from_text(choice, text)
        except ValueError:
            continue
    raise ValueError(f"{text!r} fits none of the allowed types")


def _item_type(annotation: Any) -> Any:
    """The type of a list's items, None where `annotation` is not a list or tuple."""
    if get_origin(annotation) is Annotated:
        return _item_type(get_args(annotation)[0])
    if get_origin(annotation) not in (list, tuple):
        return None
    return get_args(annotation)[0]


def _list_from_text(item: Any, text: str) -> list[Any]:
    text = text.strip()
    if text.startswith("["):
        return coerce(list[item], _json(text))
    return [from_text(item, part.strip()) for part in text.split(",")] if text else []


def _truth(text: str) -> bool:
    if text.strip().lower() not in TRUTHS:
        raise ValueError(f"{text!r} is neither true nor false")
    return TRUTHS[text.strip().lower()]


def _integer(text: str) -> int:
    if not INTEGER.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is not an integer")
    return int(text)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite number")
    return number


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"{text!r} is not JSON such as [1, 2] (texts in double quotes), nor comma-separated") from None
