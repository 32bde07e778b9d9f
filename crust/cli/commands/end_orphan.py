"""`crust end-orphan`."""

import click

from crust.inspection.options import RUN_DIR


@click.command("end-orphan")
@RUN_DIR
@click.argument("volume")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(run_dir: str, volume: str, *, yes: bool) -> None:
    """End the virtual machine that has VOLUME and is lost to its runtime, after a check.

    VOLUME is named as for describe. The check: the runtime has reported that the sandbox is lost, Kata's shim for it
    has ended, and the sandbox's claim ends with that process.

    Exit codes: 0 ended, and the volume is free; 1 refused or not confirmed; 2 the command cannot be understood;
    3 the proxy does not answer.
    """
    import asyncio

    from crust.cli import orphan

    asyncio.run(orphan.end(run_dir, volume, is_confirmed=yes))
