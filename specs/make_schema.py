"""The JSON schema of mountInfo.json, from the model that reads it; its docstrings are the descriptions."""

import ast
import itertools
import json
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel

from crust.handoff import mount_info_models, record


def json_schema() -> str:
    """The JSON schema of mountInfo.json, with a final newline."""
    schema = record.Record.model_json_schema(by_alias=True)
    documented = {**_docstrings(mount_info_models), **_docstrings(record)}
    for name, fields in documented.items():
        part = schema if name == record.Record.__name__ else schema["$defs"].get(name)
        for alias, text in fields.items() if part else ():
            described = {**part["properties"][alias], "description": text}
            part["properties"][alias] = dict(sorted(described.items()))
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2)
        + "\n"
    )


def _docstrings(of: ModuleType) -> dict[str, dict[str, str]]:
    """The docstrings of the fields of a module's models, by model and alias.

    Read here and not by pydantic's `use_attribute_docstrings`, which parses the file at each start of a program.
    """
    module = ast.parse(Path(str(of.__file__)).read_text(encoding="utf-8"))
    classes = (node for node in module.body if isinstance(node, ast.ClassDef))
    return {
        node.name: dict(_documented(node, model))
        for node in classes
        if issubclass(model := getattr(of, node.name), BaseModel)
    }


def _documented(node: ast.ClassDef, model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for field, text in itertools.pairwise(node.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(value=str(said))):
                yield model.model_fields[name].alias or name, cleandoc(said)
