"""The schemas of the custom resources that the chart renders: tests/data/custom_resources, each with its origin."""

import functools
import json
from pathlib import Path
from typing import Any

import jsonschema

_DATA = Path(__file__).parents[1] / "data" / "custom_resources"
KINDS = sorted(path.stem for path in _DATA.glob("*.json"))


def validate(item: dict[str, Any]) -> None:
    """Raise `jsonschema.ValidationError` for an object that an API server refuses, or takes without one key."""
    api, schema = _schema(item["kind"])
    if item["apiVersion"] != api:
        raise jsonschema.ValidationError(f"the schema is that of {api}")
    jsonschema.Draft7Validator(schema).validate(item)


@functools.cache
def _schema(kind: str) -> tuple[str, Any]:
    read = json.loads((_DATA / f"{kind}.json").read_text(encoding="utf-8"))
    return read["apiVersion"], _closed(read["schema"])


def _closed(schema: Any) -> Any:
    """The schema without unknown keys: an API server leaves them out of the object."""
    if isinstance(schema, list):
        return list(map(_closed, schema))
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        closed["properties"] = {
            name: _closed(value) for name, value in schema["properties"].items()
        }
        closed.setdefault("additionalProperties", False)
    return closed
