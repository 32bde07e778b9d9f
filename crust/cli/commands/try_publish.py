"""`crust try`."""

import sys
from typing import Any

import click

from crust.inspection.options import RUN_DIR


@click.command("try")
@click.option("--driver", default="", help="The driver's name. Default: the only one.")
@click.option("--handler", required=True, help="The runtime handler: `crust handlers`.")
@click.option("--size-mib", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--fs-type", default="ext4", show_default=True)
@click.option(
    "--parameter", "parameters", multiple=True, metavar="KEY=VALUE", help="StorageClass parameter."
)
@click.option(
    "--controller-socket",
    metavar="PATH",
    default="",
    help="The socket that the sidecars call, where it is not the kubelet's: of `crust shim --controller`.",
)
@click.option("--target-root", default="/var/lib/kubelet", show_default=True)
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Wait so long for a sandbox that claims the volume, and for its end. 0: do not wait.",
)
@RUN_DIR
def command(run_dir: str, size_mib: int, parameters: tuple[str, ...], **fields: Any) -> None:
    """Create a volume, publish it deferred as a kubelet does, then undo all steps.

    No other volume is touched. Exit codes: 0 it worked and all steps are undone, 1 a step was refused or could not be
    undone, 2 the command cannot be understood, 3 the proxy does not answer, 130 interrupted, with the steps undone.
    """
    pairs = [parameter.partition("=") for parameter in parameters]
    if bad := [key for key, separator, _ in pairs if not (key and separator)]:
        raise click.BadParameter(f"{bad[0]!r} is not KEY=VALUE")
    import asyncio

    from crust.cli import trial

    request = trial.TrialRequest(
        size_bytes=size_mib << 20, parameters={key: value for key, _, value in pairs}, **fields
    )
    try:
        sys.exit(asyncio.run(trial.try_publish(run_dir, request)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
