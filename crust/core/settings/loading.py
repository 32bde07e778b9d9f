"""Merges the sources of settings: defaults < TOML file < CRUST_* environment < flags. pydantic checks the result.

`load` takes its sources as arguments, so a test does not depend on its environment. A refusal names the setting and
never its value, which may be a secret that was written into the wrong place.
"""

import difflib
import logging
import re
import tomllib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import pydantic
from pydantic import BaseModel

from crust.core import errors
from crust.core.settings.program import MEANT, ProgramSettings, Table

ENVIRONMENT_PREFIX = "CRUST_"
_SERVICE_LINK = re.compile(
    r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$"
)
"""Variables that a kubelet sets in each pod for a Service whose name begins with "crust"."""
_SENTENCES = {
    "missing": "is missing",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
    "too_short": "is empty, and needs at least one",
}
"""Why a value is refused, by pydantic's name for it."""

Settings = TypeVar("Settings", bound=ProgramSettings)

_log = logging.getLogger(__name__)


class InvalidSettings(errors.InvalidRequest):
    def __init__(self, program: str, why: str, *, is_json: bool = False) -> None:
        super().__init__(f"crust {program} cannot start", why=why)
        self.is_json = is_json  # whether the refused settings want JSON in the log


def load(
    model: type[Settings],
    program: str,
    *,
    toml: str = "",
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge the sources and check the result; flags that are None were not given. Raises `InvalidSettings`.

    `toml` is the file's text. Environment variables are CRUST_<SETTING> for simple values, comma-separated for lists;
    nested settings come from the file or from flags. CSI_ENDPOINT, with or without `unix://`, is the CSI socket (CSI
    "Packaging"), stronger than the file alone. `defaults` are values of the machine, weaker than any source.
    """
    try:
        merged = {**(defaults or {}), **tomllib.loads(toml)}
    except tomllib.TOMLDecodeError as err:
        raise InvalidSettings(program, f"the settings file is not TOML: {err}") from err
    for sentence in remove_gone(merged, model):
        _log.warning("crust %s: %s", program, sentence)
    try:
        overrides = _from_environment(model, environ)
        overrides |= {name: value for name, value in flags.items() if value is not None}
        merged |= overrides
        if environ.get("CSI_ENDPOINT") and "socket" not in overrides:
            merged = model.at_endpoint(merged, _path(environ["CSI_ENDPOINT"]))
        return model.model_validate(merged)
    except pydantic.ValidationError as err:
        # the problem of each setting, without its value
        lines = err.errors(include_url=False, include_input=False)
        problems = ((_place(line["loc"], merged), _sentence(line, model)) for line in lines)
        why = "; ".join(f"{place} {why}" if place else why for place, why in problems)
    except ValueError as err:
        why = str(err)
    raise InvalidSettings(program, why, is_json=merged.get("log_format") == "json")


def remove_gone(values: dict[str, Any], model: type[Table], above: str = "") -> list[str]:
    """Remove the settings that have gone (`Table.gone`) from the tables of a file; returns a sentence for each."""
    found = []
    for name in list(values):
        if name in model.gone:
            del values[name]
            found.append(f"{above}{name} has no effect any more: {model.gone[name]}")
            continue
        below = name in model.model_fields and _model_in(model.model_fields[name].annotation)
        tables = values[name] if isinstance(values[name], list) else [values[name]]
        for table in tables:
            if below and issubclass(below, Table) and isinstance(table, dict):
                found += remove_gone(table, below, f"{above}{name}.")
    return found


def _path(endpoint: str) -> str:
    """The path of CSI_ENDPOINT, which may begin with unix:// or unix: and may lack nothing else."""
    path = endpoint.removeprefix("unix:")
    path = "/" + path.lstrip("/") if path.startswith("//") else path
    if not path.startswith("/"):
        raise ValueError(
            f"CSI_ENDPOINT is {endpoint[:128]!r}: it must be the path of a UNIX socket, e.g. unix:///run/csi/csi.sock"
        )
    return path


def _from_environment(model: type[BaseModel], environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, text in environ.items():
        name = key.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not key.startswith(ENVIRONMENT_PREFIX) or _SERVICE_LINK.search(key):
            continue
        field = model.model_fields.get(name)
        if field is None:
            near = difflib.get_close_matches(name, model.model_fields, n=1)
            meant = f"; did you mean {ENVIRONMENT_PREFIX}{near[0].upper()}?" if near else ""
            raise ValueError(f"there is no setting for the environment's {key}{meant}")
        is_list = "tuple" in str(field.annotation)
        values[name] = tuple(part for part in text.split(",") if part) if is_list else text
    return values


def _place(loc: tuple[int | str, ...], table: Any) -> str:
    """The setting's name, without the index of the one table that is written as [table] and not as [[table]]."""
    parts = []
    for part in loc:
        if isinstance(part, int) and isinstance(table, Mapping):
            continue
        parts.append(str(part))
        table = table.get(part) if isinstance(table, Mapping) else None
    return ".".join(parts)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a table, of tables in a list, or of a table that may be left out."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _sentence(line: Any, model: type[BaseModel]) -> str:
    match line["type"]:
        case "extra_forbidden":
            *tables, name = line["loc"]
            for table in tables:  # to the one of the unknown setting
                if isinstance(table, str) and table in model.model_fields:
                    model = _model_in(model.model_fields[table].annotation) or model
            near = difflib.get_close_matches(str(name), model.model_fields, n=1)
            return f"is no setting; did you mean {near[0]}?" if near else "is no setting"
        case "string_pattern_mismatch":
            return f"must be {MEANT[line['ctx']['pattern']]}"
        case "string_too_long":
            return f"is longer than {line['ctx']['max_length']} bytes"
        case "value_error":
            return str(line["ctx"]["error"])
    return _SENTENCES.get(line["type"], str(line["msg"]).replace("Input should be", "must be"))
