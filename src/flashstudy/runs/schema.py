"""Parameters at the runner's door: checked against the study's `Params` before anything runs.

papermill injects any name unchecked, so a name with code in it would run. Names must therefore be fields of the schema
and are never passed on otherwise. Values are JSON only, coerced by type (`coerce`) and then validated strictly, so that
a list of numbers cannot arrive as a text. Parameters end up in notebooks and shared pages: secrets are refused by name.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from flashstudy.runs import parameters
from flashstudy.runs.coerce import coerce

SECRET_WORDS = frozenset(["token", "key", "apikey", "secret", "password", "passwd", "credential", "credentials"])
LONGEST_ECHO = 160  # characters of a refused value that are shown


class RefusedError(ValueError):
    """Bad input, found before anything ran: one line with what was wrong and what is allowed."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a study as its schema states it; `allowed` is its type with bounds, in words."""

    name: str
    allowed: str
    default: Any
    description: str


def assignments(texts: Iterable[str]) -> dict[str, str]:
    """Names and raw texts of `name=value` arguments. Raises RefusedError for a malformed or repeated one."""
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        _refuse_secret(name)
        if not equals:
            raise RefusedError(f"parameter {_echo(text)} has no value; allowed: name=value")
        if name in values:
            raise RefusedError(f"parameter {_echo(name)} is given twice; allowed: once")
        values[name] = value
    return values


def validate(params_class: type[BaseModel], values: Mapping[str, Any], *, study: str) -> BaseModel:
    """`values` over the schema's defaults, as a Params; values may be texts, then the schema's types decide.

    Raises RefusedError in one line for an unknown or secret-like name, an ill-typed value, NaN or one out of bounds.
    """
    allowed = {parameter.name: parameter.allowed for parameter in describe(params_class)}
    typed = {}
    for name, value in values.items():
        _refuse_secret(name)
        if name not in allowed:
            raise RefusedError(f"{study}: {parameters.unknown_name(params_class, _clip(str(name)))}")
        try:
            typed[name] = _finite_json(coerce(params_class.model_fields[name].annotation, value))
        except (ValueError, TypeError) as error:
            raise RefusedError(f"{study}: parameter {name}: {_clip(str(error))}; allowed: {allowed[name]}") from None
    try:
        return params_class.model_validate_json(json.dumps(typed), strict=True)
    except ValidationError as error:
        raise RefusedError(f"{study}: {_first_error(error, allowed)}") from None


def to_json(params: BaseModel) -> dict[str, Any]:
    """The parameters as JSON values, as they are stored and handed over. Raises ValueError for NaN or infinity."""
    values = params.model_dump(mode="python")
    for name, value in values.items():
        try:
            _finite_json(_plain(value))
        except (ValueError, TypeError) as error:
            raise ValueError(f"parameter {name}: {error}") from None
    return params.model_dump(mode="json")


def parameters_hash(values: Mapping[str, Any]) -> str:
    """First 8 hexadecimal digits of the SHA-256 of the parameters in canonical JSON."""
    canonical = json.dumps(values, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def describe(params_class: type[BaseModel]) -> list[Parameter]:
    """The schema's parameters in order."""
    schema = params_class.model_json_schema()
    return [
        Parameter(name, allowed_in_words(rule, schema), rule.get("default"), rule.get("description", ""))
        for name, rule in schema.get("properties", {}).items()
    ]


def allowed_in_words(rule: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What a JSON schema rule admits: "integer ≥ 2, ≤ 16", "list of text", "one of fp32, bf16"."""
    if "$ref" in rule:
        return allowed_in_words(schema["$defs"][rule["$ref"].rsplit("/", 1)[-1]], schema)
    if "anyOf" in rule:
        return " or ".join(allowed_in_words(option, schema) for option in rule["anyOf"])
    if "enum" in rule or "const" in rule:
        return "one of " + ", ".join(str(choice) for choice in rule.get("enum", [rule.get("const")]))
    if rule.get("type") == "array":
        words = "list of " + allowed_in_words(rule.get("items", {}), schema)
    else:
        names = {"string": "text", "boolean": "true or false", "null": "none", None: "any JSON value"}
        words = names.get(rule.get("type"), str(rule.get("type")))
    limits = [sign.format(rule[key]) for key, sign in _LIMITS.items() if key in rule]
    return " ".join([words, ", ".join(limits)]).strip()


_LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minItems": "(at least {})",
    "maxItems": "(at most {})",
    "minLength": "of at least {} characters",
    "maxLength": "of at most {} characters",
    "pattern": "matching {}",
}


def _refuse_secret(name: str) -> None:
    words = re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", str(name)).lower())
    if SECRET_WORDS.intersection(words):
        raise RefusedError(
            f"parameter {_echo(name)} looks like a secret, and parameters are written into shared pages; "
            "allowed: set it as an environment variable"
        )


def _finite_json(value: Any) -> Any:
    """`value` itself where it is plain JSON without NaN or infinity; ValueError or TypeError otherwise."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            _finite_json(part)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"{_echo(value)} is a {type(value).__name__}")
    return value


def _plain(value: Any) -> Any:
    """Containers that JSON has no name for as lists, and other values as their JSON form."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


def _first_error(error: ValidationError, allowed: Mapping[str, str]) -> str:
    first = error.errors(include_url=False)[0]
    what = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return what
    name = str(first["loc"][0])
    place = name + "".join(f"[{part}]" for part in first["loc"][1:])
    return f"parameter {place}: {_echo(first['input'])}: {what}; allowed: {allowed.get(name, 'see the schema')}"


def _echo(value: Any) -> str:
    return _clip(repr(value))


def _clip(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_ECHO else text[:LONGEST_ECHO] + "…"
