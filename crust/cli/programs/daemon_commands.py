"""The commands of the daemons: node, proxy, shim, driver, kata; and the keeper. Each setting of a daemon is a flag of
the same name.

The flags are made from the model of the settings when a command runs or prints its help, and their help is the
setting's docstring: each setting is described once. A list is a repeated flag in the singular; tables have no flags,
except the two lists with short rows. A daemon's packages are imported when its command runs.
"""

import ast
import functools
import inspect
import json
import os
import pkgutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from crust.cli import refusals
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


class _Daemon(click.Command):
    """A command with a flag for each setting of `model` (module:class), or only for the settings in `only`."""

    def __init__(self, *args: Any, model: str, only: tuple[str, ...] = (), **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._model, self._only = model, only

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """--config, the settings, --help."""
        config, *others = super().get_params(ctx)
        return [config, *_flags(self._model, self._only), *others]


class _DaemonGroup(_Daemon, click.Group):
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
        from crust.core.settings.program import (
            Table,
        )  # pydantic takes a third of the time of a short command

        return issubclass(kind, Table)
    return any(map(_is_table, get_args(kind)))


@functools.cache
def _docstrings(model: type) -> dict[str, str]:
    """The text below each setting of the model, and of its base models."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if cls.__module__.startswith("crust."):
            texts |= dict(_texts(cls))
    return texts


def _texts(model: type) -> Iterator[tuple[str, str]]:
    (described,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(described, ast.ClassDef)
    for field, text in zip(described.body, described.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield ast.unparse(field.target), " ".join(ast.literal_eval(text.value).split())


_CONFIG = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML settings. Default: /etc/crust/<program>.toml, if it exists.",
)


def _daemon(name: str) -> click.Command:
    """The command that runs a program."""
    program = PROGRAMS[name]

    @click.command(name, cls=_Daemon, model=program.model, help=program.help)
    @_CONFIG
    def command(**flags: Any) -> None:
        _serve(name, flags)

    return command


def _serve(name: str, flags: dict[str, Any]) -> None:
    from crust.cli.programs import daemons

    daemons.serve(name, flags)


@click.group(
    cls=_DaemonGroup,
    model=PROGRAMS["driver"].model,
    help=PROGRAMS["driver"].help,
    invoke_without_command=True,
)
@click.pass_context
@_CONFIG
def driver(context: click.Context, /, **flags: Any) -> None:
    """`crust driver`, and the commands for its pool and its Kubernetes objects."""
    if context.invoked_subcommand is None:
        _serve("driver", flags)


@driver.command(
    "init-pool",
    cls=_Daemon,
    model=PROGRAMS["driver"].model,
    only=("state_dir", "pool_id_file"),
)
@_CONFIG
def init_pool(**flags: Any) -> None:
    """Make this node's pool, once, and print its id. An existing pool is not changed.

    The settings may be those of `crust driver` or of `crust node`.
    """
    from crust.cli.programs import daemons

    daemons.make_pool(flags)


@driver.command()
@_CONFIG
@click.option("--snapshots", is_flag=True, help="With csi-snapshotter and its classes.")
@click.option(
    "--resizer",
    is_flag=True,
    help="With csi-resizer; without node_deployment, on a cluster of one node.",
)
@click.option("--image", default="", help="The image of crust. Default: crust-csi:<version>.")
@click.option("--namespace", default="", help="Default: crust-system.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def manifest(config: Path | None, directory: Path, **choices: Any) -> None:
    """Write a DIRECTORY with the Kubernetes objects for settings, for `kubectl apply -k DIRECTORY`.

    Settings of `crust node` give the nodes' objects, settings of `crust driver` in mode controller the controller's.
    Default of --config: the settings of this node, or of deploy/kubernetes. The command calls no cluster.
    """
    from crust.cli.manifest import objects

    objects.write_manifest(config, directory, **choices)


Held = tuple[str, tuple[int, ...]]
"""A claim's name, and its descriptors."""


def _held(value: str) -> Held:
    """Parse NAME=FD,FD, of inherited descriptors."""
    name, _, numbers = value.partition("=")
    try:
        fds = tuple(map(int, numbers.split(",")))
        for fd in fds:
            os.fstat(fd)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not NAME=FD,FD") from None
    except (OSError, OverflowError):
        why = f"a descriptor of {value!r} is not open: was it inherited?"
        raise click.BadParameter(why) from None
    return name, fds


@click.command()
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    required=True,
    help="The keeper's socket, in a directory that only you can write to.",
)
@click.option("--pid", type=click.IntRange(min=1), help="The hypervisor's process.")
@click.option("--pidfd", type=click.IntRange(min=0), help="The same, by an inherited pidfd.")
@click.option(
    "--hold",
    type=_held,
    multiple=True,
    metavar="NAME=FD,FD",
    help="Inherited descriptors of a claim, lock and device, and your name for it. May be repeated.",
)
def keeper(socket: Path, pid: int | None, pidfd: int | None, hold: tuple[Held, ...]) -> None:
    """Hold claims for a hypervisor that takes no descriptors, until it ends: for runtimes in any language.

    Two processes in the background hold the descriptors and replace each other; they end after the hypervisor. If
    they run already, they get the descriptors of --hold. When this command has ended with 0, they hold all
    descriptors, and a line of JSON names the processes.

    Exit codes: 0 held, 1 refused or failed, 2 the command cannot be understood.
    """
    if (pid is None) == (pidfd is None):
        raise click.UsageError("give the hypervisor by --pid or by --pidfd")
    from crust.core import errors
    from crust.runtime_handler import keepers, process_of

    try:
        vm = keepers.process_of_pidfd(pidfd) if pidfd is not None else process_of(pid or 0)
        with keepers.start(socket, vm) as started:
            for name, fds in hold:
                started.hold(name, fds)
            held = started.held()
            state = {"pids": started.pids, "vm": started.vm_pid, "held": held}
    except errors.CrustError as error:
        refusals.tell(error)
        sys.exit(1)
    click.echo(json.dumps(state))


COMMANDS: tuple[click.Command, ...] = (
    *(driver if name == "driver" else _daemon(name) for name in PROGRAMS),
    keeper,
)
