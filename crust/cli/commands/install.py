"""`crust install`."""

import click


@click.command("install")
@click.option("--systemd", is_flag=True, required=True, help="Install units of systemd.")
def command(*, systemd: bool) -> None:
    """Install this environment's crust on the node: units, a udev rule, settings in /etc/crust, the command, its
    man pages and completion.

    Run it again after an upgrade. Your settings are kept. Exit codes: 0 installed, 1 refused or failed.
    """
    from crust.cli import install

    install.run_install()
