"""`crust config check`: the settings that a daemon would use, each with its source, without a start.

The sources are the same as at the daemon's start: defaults, its file, the environment of this command. A unit may
give its daemon another environment, and flags, which this command does not see.
"""

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from crust.cli import layouts
from crust.cli.programs import PROGRAMS, daemons
from crust.core import credentials, errors
from crust.core.settings import loading
from crust.core.settings.program import ProgramSettings
from crust.inspection import Format, output, refusals, screen, show
from crust.inspection.output import Column


@dataclass(frozen=True, slots=True)
class Setting:
    program: str
    setting: str
    value: str
    source: str


_COLUMNS = tuple(map(Column, ("program", "setting", "value", "source")))


def print_settings(programs: Sequence[str], config: Path | None, form: Format) -> int:
    """Print the settings; returns the exit code: 0 all are good, 1 some are refused.

    Raises click.UsageError, `NoSettingsFile`.
    """
    if config is not None and len(programs) != 1:
        raise click.UsageError("--config needs exactly one program, whose settings the file has")
    chosen = programs or [program for program in PROGRAMS if daemons.installed(program)]
    if not chosen:
        raise errors.NotFound.named(
            "NoSettingsFile",
            "no settings are checked",
            why=f"{daemons.CONFIG_DIR} has none of {', '.join(f'{program}.toml' for program in PROGRAMS)}",
        )
    rows: list[Setting] = []
    refused: list[str] = []
    for program in chosen:
        path = config or daemons.installed(program)
        try:
            text = daemons.text(program, path) if path else ""
            rows.extend(rows_in(program, text, str(path or ""), os.environ))
            refused.extend(layouts.unread(daemons.load(program, text, environ=os.environ)))
        except errors.CrustError as error:  # the settings, or what the node has is not seen
            refused.append(f"{path or program}: {error.shown()}")
    names = tuple(f"{row.program}.{row.setting}={row.value}" for row in rows)
    table = output.table(_COLUMNS, rows, wide=True) if rows else Text()
    shown = show.Shown({"settings": rows}, names, lambda _: table, healthy=not refused)
    code = screen.print_once(shown, form)
    for sentence in refused:
        refusals.tell(sentence)
    return code


def rows_in(program: str, text: str, path: str, environ: Mapping[str, str]) -> Iterator[Setting]:
    """The settings of a program from the text of its file. Raises `InvalidSettings`."""
    loaded = daemons.load(program, text, environ=environ)
    written_names = {name for name, _ in _flat(tomllib.loads(text))}
    for name, value in _flat(loaded.model_dump(mode="json")):
        _, is_of_part, last = name.rpartition(".")
        if is_of_part and last in ProgramSettings.model_fields:
            continue  # a part of crust node has no such settings
        shown = credentials.hidden(f"{name}={value}").removeprefix(f"{name}=")
        variable = f"{loading.ENVIRONMENT_PREFIX}{name.partition('.')[0].partition('[')[0].upper()}"
        # a list may be written as one table: shim, shim[0]
        is_written = name in written_names or name.replace("[0]", "", 1) in written_names
        source = path if is_written else "default"
        if variable in environ:
            source = f"${variable}"
        elif name.endswith("socket") and environ.get("CSI_ENDPOINT") and name not in written_names:
            source = "$CSI_ENDPOINT, or default"
        yield Setting(program, name, shown, source)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Tables and lists of tables by dotted names; everything else is a value."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _flat(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for number, below in enumerate(value):
            yield from _flat(below, f"{name}[{number}]")
    elif isinstance(value, list):
        yield name, ",".join(map(str, value))
    elif value is not None:
        yield name, str(value)
