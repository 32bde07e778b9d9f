"""`crust gc`."""

import sys

import click

from crust.inspection import Format
from crust.inspection.options import FORMAT, RUN_DIR


@click.command("gc")
@RUN_DIR
@FORMAT
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the forgotten publishes, the proof and the steps; change nothing.",
)
@click.option("--kubelet-root", default="/var/lib/kubelet", show_default=True)
@click.option(
    "--grace-s",
    type=click.FloatRange(min=60),
    default=600.0,
    show_default=True,
    help="The age that a publish must have.",
)
def command(
    run_dir: str, form: Format, *, dry_run: bool, kubelet_root: str, grace_s: float
) -> None:
    """Undo publishes that a kubelet forgot: their pod is gone, and a proof shows that no process uses them.

    Without complete proof no publish is touched, and the output names the failed check. Run it as root in the host's
    namespaces.

    Exit codes: 0 all such publishes are undone (with --dry-run: proven), 1 a publish remains,
    2 the command cannot be understood, 3 the proxy does not answer.
    """
    import asyncio

    from crust.cli.gc import collect
    from crust.cli.gc.kernel import Kernel
    from crust.inspection import screen

    options = collect.Options(run_dir, kubelet_root.rstrip("/"), grace_s, dry_run)
    results = asyncio.run(collect.collect(options, Kernel()))
    sys.exit(screen.print_once(collect.shown(results, options.kubelet_root), form))
