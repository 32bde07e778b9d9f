"""The commands that serve: node, proxy, shim, driver, kata. A flag here is a setting of the same name.

A daemon's packages are imported when its command runs.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

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
_TRACES = click.option(
    "--traces/--no-traces",
    default=None,
    help="Send spans to the OpenTelemetry collector that OTEL_EXPORTER_OTLP_ENDPOINT names. Default: no.",
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


def _of_a_daemon(command: Callable[..., None]) -> Callable[..., None]:
    """The flags of every daemon, before its own."""
    for option in (_TRACES, _METRICS, _LOG_FORMAT, _LOG_LEVEL, _CONFIG):
        command = option(command)
    return command


@click.command()
@_of_a_daemon
@click.option("--node-name", help="This node's name in the cluster. Default: the host's name.")
def node(**flags: Any) -> None:
    """Proxy, shim and driver in one process: the usual way on a node."""
    from crust.cli.programs import daemons

    with daemons.loading():
        from crust.node import process
        from crust.node.settings import NodeSettings

    daemons.serve(NodeSettings, "node", process.run, flags, stop_s=daemons.STOP_OF_DRIVER_S)


@click.command()
@_of_a_daemon
@_ROOT
@_PROPAGATION
@click.option("--run-dir", help="The proxy's own sockets. Default: /run/crust.")
@click.option("--volumes-root", help="The handoff directory. Default: /run/crust/volumes.")
@click.option(
    "--handler-grace-s", type=float, help="How long a call waits for a handler after a start."
)
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
    from crust.cli.programs import daemons

    with daemons.loading():
        from crust.core.settings.proxy import ProxySettings
        from crust.proxy import app

    flags["drivers"] = daemons.drivers(flags["drivers"])
    daemons.serve(ProxySettings, "proxy", app.run, flags)


@click.command()
@_of_a_daemon
@_PROFILE
@click.option("--socket", help="What the proxy calls.")
@click.option("--driver-socket", help="The driver that is wrapped.")
@click.option(
    "--driver-name",
    help="Its name for the CO. Default: what it called itself when it was first asked.",
)
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
    "--check-detach/--no-check-detach",
    default=None,
    help="With --controller: detach nothing that a guest may use. Default: yes, by the Kubernetes API.",
)
@click.option(
    "--controller/--no-controller",
    default=None,
    help="Wrap the driver's controller, for its sidecars, and not its node part. Default: no.",
)
def shim(**flags: Any) -> None:
    """Wrap one CSI driver."""
    from crust.cli.programs import daemons

    with daemons.loading():
        from crust.core.settings.shim import ShimSettings
        from crust.csi_shim import process

    daemons.serve(ShimSettings, "shim", process.run, flags)


@click.command()
@_of_a_daemon
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    metavar="NAME,CONFIGURATION",
    help="A runtime of containerd that is Kata's: its name, and Kata's configuration.toml.",
)
@click.option("--run-dir", help="The daemon's own sockets. Default: /run/crust/kata.")
@click.option("--volumes-root", help="The handoff directory. Default: /run/crust/volumes.")
@click.option(
    "--handlers-socket", help="Where the proxy takes handlers. Default: /run/crust/handlers.sock."
)
@click.option("--nri-socket", help="The container engine's. Default: /run/nri/nri.sock.")
@click.option(
    "--default-runtime", help="containerd's default_runtime_name. Default: it is none of Kata's."
)
@click.option(
    "--filesystem", "filesystems", multiple=True, help="The guest can mount it. Default: ext4, xfs."
)
@click.option("--kata-volumes", help="Kata's directory of direct volumes.")
@click.option("--kata-sandboxes", help="Where Kata's Go runtime writes its state.")
def kata(**flags: Any) -> None:
    """Let an unmodified Kata Containers use deferred volumes: an NRI plugin of the container engine."""
    from crust.cli.programs import daemons

    with daemons.loading():
        from crust.core.settings.kata import KataSettings
        from crust.kata import process

    flags["runtimes"] = daemons.kata_runtimes(flags["runtimes"])
    daemons.serve(KataSettings, "kata", process.run, flags)


@click.group(invoke_without_command=True)
@click.pass_context
@_of_a_daemon
@_PROFILE
@_ROOT
@_PROPAGATION
@click.option("--socket", help="What the shim or the CO calls.")
@_STATE_DIR
@click.option(
    "--create-pool/--no-create-pool", default=None, help="Make the pool at the first start."
)
@_POOL_ID_FILE
@click.option("--driver-name", help="The driver's name. Default: block.csi.crust.dev.")
@click.option(
    "--mode",
    type=click.Choice(["all", "controller", "node"]),
    help="Which part of the driver runs here. Default: all.",
)
@click.option(
    "--engine", type=click.Choice(["files", "rbd"]), help="What holds the volumes. Default: files."
)
@click.option(
    "--node-deployment/--no-node-deployment",
    default=None,
    help="Each node's driver provisions for itself, by sidecars with the same flag. Default: no.",
)
@click.option("--run-dir", help="Invalid after a reboot. Default: /run/crust/driver.")
@click.option("--node-id", help="This node's name. Default: the host's name.")
@click.option(
    "--overcommit",
    type=float,
    help="Provisioned capacity, as a multiple of the pool's size. Default: 1.",
)
@click.option("--pool-low-percent", type=int, help="Warn when less is free. Default: 10.")
@click.option("--max-volumes", type=int, help="How many volumes the node takes. Default: 128.")
@click.option("--runtime-socket", help="The proxy's Runtime API. Default: guests cannot be asked.")
@click.option("--io-cgroup", help="The pods' control group. Default: the kubelet's.")
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
        defaults=_here(),
        stop_s=daemons.STOP_OF_DRIVER_S,
    )


@driver.command("init-pool")
@_CONFIG
@_STATE_DIR
@_POOL_ID_FILE
def init_pool(**flags: Any) -> None:
    """Make this node's pool, once, and print its id. If it is there already, nothing is changed.

    The settings may be those of `crust driver` or of `crust node`.
    """
    from crust.cli.programs import init_pool

    sys.exit(init_pool.run(flags))


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
    from crust.cli.manifest import command

    sys.exit(command.run(config, directory, **choices))


def _here() -> dict[str, Any]:
    return {"node_id": os.uname().nodename}


COMMANDS: tuple[click.Command, ...] = (node, proxy, shim, driver, kata)
