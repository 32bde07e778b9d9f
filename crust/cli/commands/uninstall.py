"""`crust uninstall`."""

import click


@click.command("uninstall")
def command() -> None:
    """Remove the files of `crust install`, but no settings and no volumes. Stop the units before.

    Exit codes: 0 removed, 1 refused or failed.
    """
    from crust.cli import install
    from crust.cli.doctor.node import Node
    from crust.proxy.guard import Targets

    install.run_uninstall(lambda: Targets(Node().kubelet_roots()).unseal_all())
