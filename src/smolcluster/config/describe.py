"""Describe a key's allowed values, and a given value, for errors and the reference page."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

from pydantic_core import ErrorDetails

from smolcluster.config.names import SECTIONS
from smolcluster.config.schema import Config, StrategyConfig
from smolcluster.config.strategies import BUILT_IN, all_records
from smolcluster.config.tree import KeyPath

_WORDS = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}


@functools.cache
def json_schema() -> dict[str, Any]:
    return Config.model_json_schema()


def schema_for_editors() -> dict[str, Any]:
    """Return the JSON schema, including the options of strategies from other installed packages."""
    schema = copy.deepcopy(json_schema())
    section = schema["$defs"][StrategyConfig.__name__]["properties"]
    for record in all_records().values():
        for plane in record.planes if record.name not in BUILT_IN else ():
            own = {} if (made := record.options_on(plane)) is None else made.model_json_schema()
            schema["$defs"] |= own.get("$defs", {})
            for key, described in own.get("properties", {}).items():
                text = f"{record.name}: {described.get('description', '')}".rstrip(": ")
                section.setdefault(key, described | {"description": text})
    return schema


def reason(part: ErrorDetails) -> str:
    """Return the message of a validation error, without pydantic's prefix for our own checks."""
    return str(part["ctx"]["error"]) if part["type"] == "value_error" else part["msg"]


def allowed(path: KeyPath) -> str:
    """Describe the allowed values at `path`: `a whole number, at least 1, or null`."""
    if path[0] in SECTIONS and len(path) == 1:
        return f"a mapping, with keys such as {', '.join(list(SECTIONS[str(path[0])].model_fields)[:3])}"
    return _in_words(_schema_at(path))


def _schema_at(path: KeyPath) -> dict[str, Any]:
    """Return the JSON schema of a key, or of an entry inside it."""
    schema: dict[str, Any] = json_schema()
    for step in path:
        for option in map(_resolve_ref, schema.get("anyOf", [schema])):
            if step in option.get("properties", {}):
                schema = _resolve_ref(option["properties"][step])
            elif isinstance(option.get("additionalProperties"), dict):
                schema = _resolve_ref(option["additionalProperties"])
            elif "prefixItems" in option:
                schema = option["prefixItems"][min(int(step), len(option["prefixItems"]) - 1)]
            elif "items" in option:
                schema = option["items"]
    return schema


def _resolve_ref(schema: dict[str, Any]) -> dict[str, Any]:
    """Resolve a `$ref`."""
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = json_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    return found


def keys_at(path: KeyPath) -> list[str]:
    """Return the known keys of the mapping at `path`."""
    return list(_schema_at(path).get("properties", {}))


def _in_words(schema: dict[str, Any]) -> str:
    schema = _resolve_ref(schema)
    if "properties" in schema:
        return f"a mapping, with keys such as {', '.join(list(schema['properties'])[:3])}"
    if "anyOf" in schema:
        return ", or ".join(_in_words(option) for option in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        *first, last = schema["enum"]
        return f"{', '.join(first)} or {last}"
    match schema.get("type"):
        case "null":
            return "null"
        case "array" if "prefixItems" in schema:
            return f"a list of {len(schema['prefixItems'])}, each {_in_words(schema['prefixItems'][0])}"
        case "array":
            return f"a list, each {_in_words(schema['items'])}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"a mapping of names, each to {_in_words(inner)}" if isinstance(inner, dict) else "a mapping"
        case str(kind):
            return _WORDS[kind] + _bounds(schema)
    return "any value"


def _bounds(schema: dict[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']:g} to {schema['maximum']:g}"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {_number(schema[key])}" for key, word in words.items() if key in schema]
    return ", " + " and ".join(limits) if limits else ""


def _number(limit: float) -> str:
    return "2^63" if limit == 2**63 else f"{limit:g}"


def hide_credentials(url: str) -> str:
    """Return the URL without user and password. If it is malformed, errs on the side of removing too much."""
    scheme, colon, rest = url.rpartition("://") if "://" in url else ("", "", url)
    return scheme.rpartition("@")[2] + colon + rest.rpartition("@")[2]


def show(value: Any) -> str:
    """Return a value as YAML, shortened, with credentials in URLs removed."""
    if isinstance(value, str) and "://" in value:
        value = hide_credentials(value)
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:76] + " ..."
