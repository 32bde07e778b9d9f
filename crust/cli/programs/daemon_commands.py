"""The commands that serve: node, proxy, shim, driver, kata. Each setting of a daemon is a flag of the same name.

The flags are made from the model of the settings when a command is looked at or run, and their help is the setting's
own docstring: a setting is described once. A list is a flag in the singular that is repeated; tables have no flags,
but for the two lists whose rows are few words. A daemon's packages are imported when its command runs.
"""

import ast
import functools
import inspect
import os
import pkgutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from crust.cli.programs.keeper_command import keeper

if TYPE_CHECKING:  # pydantic takes a third of the time of a short command
    from crust.core.settings.program import ProgramSettings

_ROWS = {"drivers": "NAME,SOCKET,BACKEND", "runtimes": "NAME,CONFIGURATION"}
"""Lists of tables that are flags, too."""


def _row(text: str, fields: str) -> dict[str, str]:
    """A row of such a list, as a table of the settings file has it."""
    names, parts = fields.lower().split(","), text.split(",")
    if len(parts) != len(names):
        raise click.BadParameter(f"{text!r} is not {fields}")
    return dict(zip(names, parts, strict=True))


class _Setting(click.Option):
    """The flag of a setting. pydantic checks its value, as that of every other source."""

    def __init__(self, model: "type[ProgramSettings]", name: str) -> None:
        field = model.model_fields[name]
        self._of = model
        flag, kind = name.replace("_", "-"), field.annotation
        more: dict[str, Any] = {"metavar": _ROWS.get(name, "TEXT")}
        declared = [f"--{flag}", name]
        if kind is bool:
            declared, more = [f"--{flag}/--no-{flag}", name], {}
        elif get_origin(kind) is tuple:
            declared, more["multiple"] = [f"--{flag.removesuffix('s')}", name], True
        elif get_origin(kind) is Literal:
            choices = get_args(kind)
            more["metavar"] = f"[{'|'.join(choices)}]"
            more["shell_complete"] = lambda *asked: [
                choice for choice in choices if choice.startswith(asked[2])
            ]
        if name in _ROWS:
            more["type"] = lambda text: _row(text, _ROWS[name])
        self._default = field.default
        super().__init__(declared, default=None, **more)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As click has it; the help is read from the settings' source only for who wants it."""
        assert self.name is not None
        self.help = _docstrings(self._of)[self.name]
        shown = str(self._default).lower() if isinstance(self._default, bool) else self._default
        if isinstance(shown, str | int | float) and shown not in ("", os.uname().nodename):
            self.help += f"  [default: {shown}]"
        return super().get_help_record(ctx)


class _Daemon(click.Command):
    """A command with a flag for each setting of `model` (module:class), or for those of `only`."""

    def __init__(self, *args: Any, model: str, only: tuple[str, ...] = (), **more: Any) -> None:
        super().__init__(*args, **more)
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
        if name in _ROWS or "core.settings" not in str(field.annotation)  # else a table
    ]
    return tuple(_Setting(model, name) for name in only or plain)


@functools.cache
def _docstrings(model: type) -> dict[str, str]:
    """The text below each setting of the model, and of those that it builds upon."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        if each.__module__.startswith("crust."):
            found |= dict(_texts(each))
    return found


def _texts(model: type) -> Iterator[tuple[str, str]]:
    (described,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(described, ast.ClassDef)
    for field, text in zip(described.body, described.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield ast.unparse(field.target), " ".join(ast.literal_eval(text.value).split())


_CONFIG = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML settings. Default: /etc/crust/<program>.toml, if it is there.",
)


@click.command(cls=_Daemon, model="crust.node.settings:NodeSettings")
@_CONFIG
def node(**flags: Any) -> None:
    """Proxy, shim and driver in one process: the usual way on a node."""
    from crust.cli.programs import daemons

    with daemons.loading():
        from crust.node import node_process
        from crust.node.settings import NodeSettings

    daemons.serve(NodeSettings, "node", node_process.run, flags, stop_s=daemons.STOP_OF_DRIVER_S)


@click.command(cls=_Daemon, model="crust.core.settings.proxy:ProxySettings")
@_CONFIG
def proxy(**flags: Any) -> None:
    """Serve the CO's CSI sockets of this node."""
    from crust.cli.programs import daemons

    with daemons.loading():
        from crust.core.settings.proxy import ProxySettings
        from crust.proxy import proxy_process

    daemons.serve(ProxySettings, "proxy", proxy_process.run, flags)


@click.command(cls=_Daemon, model="crust.core.settings.shim:ShimSettings")
@_CONFIG
def shim(**flags: Any) -> None:
    """Wrap one CSI driver."""
    from crust.cli.programs import daemons

    with daemons.loading():
        from crust.core.settings.shim import ShimSettings
        from crust.csi_shim import shim_process

    daemons.serve(ShimSettings, "shim", shim_process.run, flags)


@click.command(cls=_Daemon, model="crust.core.settings.kata:KataSettings")
@_CONFIG
def kata(**flags: Any) -> None:
    """Let an unmodified Kata Containers use deferred volumes: an NRI plugin of the container engine."""
    from crust.cli.programs import daemons

    with daemons.loading():
        from crust.core.settings.kata import KataSettings
        from crust.kata import process

    daemons.serve(KataSettings, "kata", process.run, flags)


@click.group(
    cls=_DaemonGroup, model="crust.core.settings.driver:DriverSettings", invoke_without_command=True
)
@click.pass_context
@_CONFIG
def driver(context: click.Context, /, **flags: Any) -> None:
    """Serve block.csi.crust.dev, the block-volume CSI driver."""
    if context.invoked_subcommand is not None:
        return
    from crust.cli.programs import daemons

    with daemons.loading():
        from crust.blockdriver import serve
        from crust.core.settings.driver import DriverSettings

    daemons.serve(
        DriverSettings,
        "driver",
        serve.run,
        flags,
        defaults={"node_id": os.uname().nodename},
        stop_s=daemons.STOP_OF_DRIVER_S,
    )


@driver.command(
    "init-pool",
    cls=_Daemon,
    model="crust.core.settings.driver:DriverSettings",
    only=("state_dir", "pool_id_file"),
)
@_CONFIG
def init_pool(**flags: Any) -> None:
    """Make this node's pool, once, and print its id. If it is there already, nothing is changed.

    The settings may be those of `crust driver` or of `crust node`.
    """
    from crust.cli.programs import init_pool

    init_pool.make_pool(flags)


@driver.command()
@_CONFIG
@click.option("--snapshots", is_flag=True, help="With csi-snapshotter and its classes.")
@click.option(
    "--resizer", is_flag=True, help="With csi-resizer, on a cluster of one node: it has one leader."
)
@click.option("--image", default="", help="The image of crust. Default: crust-csi:<version>.")
@click.option("--namespace", default="", help="Default: crust-system.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def manifest(config: Path | None, directory: Path, **choices: Any) -> None:
    """Write a DIRECTORY with the Kubernetes objects for settings, for `kubectl apply -k DIRECTORY`.

    For those of `crust node` the nodes' objects, for those of `crust driver` in mode controller the controller's.
    Without --config for those of this node, or of deploy/kubernetes where there are none. No cluster is asked.
    """
    from crust.cli.manifest import objects

    objects.write_manifest(config, directory, **choices)


COMMANDS: tuple[click.Command, ...] = (node, proxy, shim, driver, kata, keeper)
