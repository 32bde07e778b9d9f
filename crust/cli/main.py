"""`crust`: the commands, each a few lines over one package.

Packages are imported when their command runs: `crust status` should not pay for the driver.
"""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import click

import crust
from crust.cli import daemons, inspecting

_CONFIG = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML settings. Default: /etc/crust/<program>.toml, if it is there.",
)
_LOG_LEVEL = click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
_LOG_FORMAT = click.option("--log-format", type=click.Choice(["json", "console"]))
_METRICS = click.option(
    "--metrics-address", metavar="HOST:PORT", help="Where Prometheus may read. Default: nowhere."
)
_TAKE_OVER = click.option(
    "--take-over/--no-take-over",
    default=None,
    help="Take the state over from a process that serves, with no gap for its callers.",
)
_PROPAGATION = click.option(
    "--check-propagation/--no-check-propagation",
    default=None,
    help="Refuse to start where mounts would not reach the host. Default: yes.",
)
_PROFILE = click.option("--csi-profile", type=click.Choice(["1.12", "1.13"]))
_ROOT = click.option("--target-root", "target_roots", multiple=True, help="The kubelet's root.")

_STATE_DIR = click.option("--state-dir", help="The pool. Default: /var/lib/crust/block.")
_POOL_ID_FILE = click.option(
    "--pool-id-file", help="Where the pool's id is remembered. Default: --state-dir with .pool-id."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(crust.__version__, prog_name="crust")
def main() -> None:
    """Hand CSI volumes to microVM runtimes, with nothing patched."""


@main.command()
@_CONFIG
@_LOG_LEVEL
@_LOG_FORMAT
@_METRICS
@_TAKE_OVER
@click.option("--node-name", help="This node's name in the cluster. Default: the host's name.")
def node(**flags: Any) -> None:
    """Proxy, shim and driver in one process: the usual way on a node."""
    with daemons.loading():
        from crust.node import process
        from crust.node.settings import NodeSettings

    daemons.serve(NodeSettings, "node", process.run, flags)


@main.command()
@_CONFIG
@_LOG_LEVEL
@_LOG_FORMAT
@_METRICS
@_TAKE_OVER
@_ROOT
@_PROPAGATION
@click.option("--run-dir", help="The proxy's own sockets. Default: /run/crust.")
@click.option("--volumes-root", help="The handoff directory. Default: /run/crust/volumes.")
@click.option(
    "--handler-grace-s", type=float, help="How long a call waits for a handler after a start."
)
@click.option("--drivers-dir", help="Its files *.toml add drivers while the proxy runs.")
@click.option(
    "--plugins-registry", help="Register drivers here: /var/lib/kubelet/plugins_registry."
)
@click.option(
    "--driver",
    "drivers",
    multiple=True,
    metavar="NAME,SOCKET,BACKEND",
    help="A driver: its name, the socket the CO calls, the shim's socket.",
)
def proxy(**flags: Any) -> None:
    """Serve the CO's CSI sockets of this node."""
    with daemons.loading():
        from crust.proxy import app
        from crust.settings import ProxySettings

    flags["drivers"] = daemons.drivers(flags["drivers"])
    daemons.serve(ProxySettings, "proxy", app.run, flags)


@main.command()
@_CONFIG
@_LOG_LEVEL
@_LOG_FORMAT
@_METRICS
@_TAKE_OVER
@_PROFILE
@click.option("--socket", help="What the proxy calls.")
@click.option("--driver-socket", help="The driver that is wrapped.")
@click.option("--runtime-socket", help="The proxy's Runtime API. Default: /run/crust/runtime.sock.")
@click.option(
    "--wrap/--no-wrap",
    default=None,
    help="Defer volumes of a driver that does not defer by itself. Default: yes.",
)
@click.option("--kubelet-root", help="The kubelet's root directory. Default: /var/lib/kubelet.")
@click.option(
    "--defer",
    type=click.Choice(["always", "never", "runtime-class"]),
    help="For volumes whose context does not say. Default: never.",
)
@_PROPAGATION
@click.option(
    "--controller/--no-controller",
    default=None,
    help="Wrap the driver's controller, for its sidecars, and not its node part. Default: no.",
)
def shim(**flags: Any) -> None:
    """Wrap one CSI driver."""
    with daemons.loading():
        from crust.csi_shim import process
        from crust.settings import ShimSettings

    daemons.serve(ShimSettings, "shim", process.run, flags)


@main.group(invoke_without_command=True)
@click.pass_context
@_CONFIG
@_LOG_LEVEL
@_LOG_FORMAT
@_METRICS
@_TAKE_OVER
@_PROFILE
@_ROOT
@_PROPAGATION
@click.option("--socket", help="What the shim or the CO calls.")
@_STATE_DIR
@click.option(
    "--create-pool/--no-create-pool", default=None, help="Make the pool at the first start."
)
@_POOL_ID_FILE
@click.option("--run-dir", help="Invalid after a reboot. Default: /run/crust/driver.")
@click.option("--node-id", help="This node's name. Default: the host's name.")
@click.option(
    "--overcommit",
    type=float,
    help="Provisioned capacity, as a multiple of the pool's size. Default: 1.",
)
@click.option("--max-volumes", type=int, help="How many volumes the node takes. Default: computed.")
@click.option("--runtime-socket", help="The proxy's Runtime API. Default: guests cannot be asked.")
@click.option("--io-cgroup", help="The pods' control group. Default: the kubelet's.")
@click.option(
    "--modify-window-s", type=float, help="How long a change waits for others to coalesce with."
)
@click.option(
    "--ephemeral-grace-s",
    type=float,
    help="Delete an inline ephemeral volume that is unused so long. Default: 3600.",
)
def driver(context: click.Context, /, **flags: Any) -> None:
    """Serve block.csi.crust.dev, the block-volume CSI driver."""
    if context.invoked_subcommand is not None:
        return
    with daemons.loading():
        from crust.blockdriver import serve
        from crust.host.mounts import propagation
        from crust.settings import DriverSettings

    async def run(settings: DriverSettings) -> None:
        if settings.check_propagation:
            await asyncio.to_thread(propagation.check, settings.target_roots)
        await serve.run(
            socket=settings.socket,
            state_dir=settings.state_dir,
            run_dir=settings.run_dir,
            node_id=settings.node_id,
            pool_id_file=settings.pool_id_file,
            create_pool=settings.create_pool,
            csi_profile=settings.csi_profile,
            target_roots=settings.target_roots,
            overcommit=settings.overcommit,
            max_volumes=settings.max_volumes,
            runtime_socket=settings.runtime_socket,
            io_cgroup=settings.io_cgroup,
            modify_window_s=settings.modify_window_s,
            ephemeral_grace_s=settings.ephemeral_grace_s,
            take_over=settings.take_over,
        )

    daemons.serve(DriverSettings, "driver", run, flags, defaults=_here())


@driver.command("init-pool")
@_CONFIG
@_STATE_DIR
@_POOL_ID_FILE
def init_pool(**flags: Any) -> None:
    """Make this node's pool, once, and print its id. If it is there already, nothing is changed.

    The settings may be those of `crust driver` or of `crust node`.
    """
    from crust.cli import init_pool

    sys.exit(init_pool.run(flags))


def _here() -> dict[str, Any]:
    return {"node_id": os.uname().nodename}


for _each in inspecting.COMMANDS:
    main.add_command(_each)


@main.command()
@click.argument("name", required=False)
@click.option("--volume", help="Why this volume is deferred, by its id, and where it is.")
@click.option("--target", help="Why the volume at this target path is deferred.")
@inspecting.RUN_DIR
def explain(name: str | None, volume: str | None, target: str | None, run_dir: str) -> None:
    """What an error means, who retries, what to do: `crust explain MountFailed`.

    With --volume or --target: what decided that a volume is deferred.
    """
    if [name, volume, target].count(None) != 2:
        raise click.UsageError("give the name of an error, or --volume, or --target")
    if name is not None:
        from crust.cli import explain

        explain.run(name)
        return
    from crust.cli import decisions

    sys.exit(asyncio.run(decisions.volume(run_dir, volume=volume or "", target=target or "")))


@main.group()
def policy() -> None:
    """The rules by which the proxy decides whether a publish is deferred."""


@policy.command("explain")
@click.option("--driver", required=True, help="The driver's name.")
@click.option(
    "--context", "pairs", multiple=True, metavar="KEY=VALUE", help="Of the volume context."
)
@click.option("--pod", metavar="NAMESPACE/NAME/UID", help="The pod that the volume is for.")
@click.option("--flag", is_flag=True, help="The CO's flag defer_fs_ops is set.")
@click.option("--block", is_flag=True, help="The volume is published as a raw block device.")
@inspecting.RUN_DIR
def policy_explain(run_dir: str, **question: Any) -> None:
    """Whether a publish would be deferred, to which handler, and which rule says so.

    Exit codes: 0 it was decided, 1 it is refused, 2 the command cannot be understood, 3 the proxy does not answer.
    """
    from crust.cli import decisions

    sys.exit(asyncio.run(decisions.policy(run_dir, **question)))


def _of_runtime(context: click.Context, _: click.Parameter, command: str | None) -> None:
    """The suite for runtimes shares no flag with the one for drivers, so it runs before those are looked at."""
    if command is None or context.resilient_parsing:
        return
    from crust.cli import conformance_of_runtime

    context.exit(conformance_of_runtime.run(command))


@main.command()
@click.option("--systemd", is_flag=True, required=True, help="Install units of systemd.")
def install(*, systemd: bool) -> None:
    """Install this environment's crust on the node: units, a udev rule, settings in /etc/crust, the command, its
    man pages and completion.

    Run it again after an upgrade. Your settings are kept. Exit codes: 0 installed, 1 refused or failed.
    """
    from crust.cli import install

    install.run_install()


@main.command()
def uninstall() -> None:
    """Remove what `crust install` wrote, but no settings and no volumes. The units must have been stopped.

    Exit codes: 0 removed, 1 refused or failed.
    """
    from crust.cli import install

    install.run_uninstall()


@main.command()
@click.option("--endpoint", help="The driver's socket, unix:///…/csi.sock.")
@click.option(
    "--profile",
    type=click.Choice(["1.12", "1.13"]),
    help="The CSI that the driver speaks. Default: by what it advertises.",
)
@click.option(
    "--target-root",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    default="/var/lib/kubelet",
    help="Below it volumes are staged and published. Default: /var/lib/kubelet.",
)
@click.option(
    "--junit",
    type=click.Path(dir_okay=False, resolve_path=True, path_type=Path),
    help="Where a report goes (JUnit XML).",
)
@click.option(
    "--json",
    type=click.Path(dir_okay=False, resolve_path=True, path_type=Path),
    help="Where a report goes (JSON: every case, clause, request and answer).",
)
@click.option(
    "--parameters",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What the driver's volumes need (TOML): docs/conformance.md.",
)
@click.option(
    "--log",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The driver's log, to look for planted secrets.",
)
@click.option("--restart-command", default="", help="Kills the driver and starts it again.")
@click.option("--only", multiple=True, metavar="C-101", help="These cases: C-101, C-100..C-199.")
@click.option("--skip", multiple=True, metavar="C-101", help="All but these cases.")
@click.option(
    "--strict", is_flag=True, help="Fail also on a broken SHOULD, and beyond the specification."
)
@click.option("--list", "list_cases", is_flag=True, help="List the cases and run none.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Of each call.",
)
@click.option(
    "--runtime",
    metavar="COMMAND",
    is_eager=True,
    expose_value=False,
    callback=_of_runtime,
    help="Check a runtime against specs/handoff.md instead: docs/runtime-author.md.",
)
def conformance(**flags: Any) -> None:
    """Check any CSI driver against the rules of the specification.

    Run it as root where the driver's mounts are visible. Exit codes: 0 no MUST is broken, 1 one is, 2 the command
    cannot be understood or was interrupted, 3 the driver does not answer.
    """
    from crust.cli import conformance

    sys.exit(conformance.run(**flags))
