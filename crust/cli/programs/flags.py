"""The command of a daemon: each setting is a flag of the same name.

The flags are made from the model of the settings when a command runs or prints its help, and their help is the
setting's docstring: each setting is described once. A list is a repeated flag in the singular; tables have no flags,
except the two lists with short rows. A daemon's packages are imported when its command runs.
"""

import ast
import functools
import inspect
import os
import pkgutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from crust.cli.programs import PROGRAMS

if TYPE_CHECKING:  # pydantic takes a third of the time of a short command
    from crust.core.settings.program import ProgramSettings

_ROWS = {"drivers": "NAME,SOCKET,BACKEND", "runtimes": "NAME,CONFIGURATION"}
"""The lists of tables that are also flags, and the fields of a row."""


def _row(text: str, fields: str) -> dict[str, str]:
    """A row of such a list, as a table of the settings file."""
    names, parts = fields.lower().split(","), text.split(",")
    if len(parts) != len(names):
        raise click.BadParameter(f"{text!r} is not {fields}")
    return dict(zip(names, parts, strict=True))


class _Setting(click.Option):
    """The flag of a setting. pydantic checks its value, as it checks every other source."""

    def __init__(self, model: "type[ProgramSettings]", name: str) -> None:
        field = model.model_fields[name]
        self._model = model
        flag, kind = name.replace("_", "-"), field.annotation
        keywords: dict[str, Any] = {"metavar": _ROWS.get(name, "TEXT")}
        declared = [f"--{flag}", name]
        if kind is bool:
            declared, keywords = [f"--{flag}/--no-{flag}", name], {}
        elif get_origin(kind) is tuple:
            declared, keywords["multiple"] = [f"--{flag.removesuffix('s')}", name], True
        elif get_origin(kind) is Literal:
            choices = get_args(kind)
            keywords["metavar"] = f"[{'|'.join(choices)}]"
            keywords["shell_complete"] = lambda *arguments: [
                choice for choice in choices if choice.startswith(arguments[2])
            ]
        if name in _ROWS:
            keywords["type"] = lambda text: _row(text, _ROWS[name])
        self._default = field.default
        super().__init__(declared, default=None, **keywords)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Give the help and the default. The help is read from the settings' source only here."""
        assert self.name is not None
        self.help = _docstrings(self._model)[self.name]
        shown = str(self._default).lower() if isinstance(self._default, bool) else self._default
        if isinstance(shown, str | int | float) and shown not in ("", os.uname().nodename):
            self.help += f"  [default: {shown}]"
        return super().get_help_record(ctx)


class Daemon(click.Command):
    """A command with a flag for each setting of `model` (module:class), or only for the settings in `only`."""

    def __init__(self, *args: Any, model: str, only: tuple[str, ...] = (), **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._model, self._only = model, only

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """--config, the settings, --help."""
        config, *others = super().get_params(ctx)
        return [config, *_flags(self._model, self._only), *others]


class DaemonGroup(Daemon, click.Group):
    """A daemon with commands below it."""


@functools.cache
def _flags(path: str, only: tuple[str, ...]) -> tuple[click.Option, ...]:
    model: type[ProgramSettings] = pkgutil.resolve_name(path)
    plain = [
        name
        for name, field in model.model_fields.items()
        if name in _ROWS or not _is_table(field.annotation)
    ]
    return tuple(_Setting(model, name) for name in only or plain)


def _is_table(kind: Any) -> bool:
    """Whether a setting is a table, or a list or mapping of tables."""
    if isinstance(kind, type) and not get_args(kind):
        # pydantic takes a third of the time of a short command
        from crust.core.settings.program import Table

        return issubclass(kind, Table)
    return any(map(_is_table, get_args(kind)))


@functools.cache
def _docstrings(model: type) -> dict[str, str]:
    """The text below each setting of the model, and of its base models."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not cls.__module__.startswith("crust."):
            continue
        (described,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(described, ast.ClassDef)
        for field, text in zip(described.body, described.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


CONFIG = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML settings. Default: /etc/crust/<program>.toml, if it exists.",
)


def daemon(name: str) -> click.Command:
    program = PROGRAMS[name]

    @click.command(name, cls=Daemon, model=program.model, help=program.help)
    @CONFIG
    def command(**flags: Any) -> None:
        from crust.cli.programs import daemons

        daemons.serve(name, flags)

    return command
