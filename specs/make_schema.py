"""The JSON schema of mountInfo.json, from the model that reads it; its docstrings are the descriptions."""

import ast
import itertools
import json
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

from pydantic import BaseModel

from crust.handoff import mount_info


def json_schema() -> str:
    """The JSON schema of mountInfo.json, with a final newline."""
    schema = mount_info.MountInfo.model_json_schema(by_alias=True)
    for name, fields in _docstrings().items():
        part = schema if name == mount_info.MountInfo.__name__ else schema["$defs"].get(name)
        for alias, text in fields.items() if part else ():
            described = {**part["properties"][alias], "description": text}
            part["properties"][alias] = dict(sorted(described.items()))
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2)
        + "\n"
    )


def _docstrings() -> dict[str, dict[str, str]]:
    """The docstrings of the fields, by model and alias.

    Read here and not by pydantic's `use_attribute_docstrings`, which parses the file at each start of a program.
    """
    module = ast.parse(Path(mount_info.__file__).read_text(encoding="utf-8"))
    return {
        each.name: dict(_documented(each))
        for each in module.body
        if isinstance(each, ast.ClassDef) and issubclass(getattr(mount_info, each.name), BaseModel)
    }


def _documented(model: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(model.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(value=str(said))):
                fields = getattr(mount_info, model.name).model_fields
                yield fields[name].alias or name, cleandoc(said)
