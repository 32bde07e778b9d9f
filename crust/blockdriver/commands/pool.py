"""`crust pool`."""

import click

from crust.inspection.options import Question, shows


@click.group("pool", invoke_without_command=True)
@shows
@click.option("--driver", default="", help="Only the pool of this driver.")
@click.pass_context
def command(context: click.Context, driver: str) -> "Question | None":
    """Show the pools of this node's drivers: their space, and each volume, used or unused."""
    if context.invoked_subcommand is not None:
        return None
    from crust.blockdriver.commands import pool_volumes

    return pool_volumes.pools(driver)


@command.command()
@click.argument("volume")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def delete(context: click.Context, volume: str, *, yes: bool) -> None:
    """Delete VOLUME, by its id or its PersistentVolume, with its data, if it is unused: for one that a CO forgot.

    Exit codes: 0 deleted, 1 refused or not confirmed, 2 the command cannot be understood, 3 the proxy does not
    answer.
    """
    import asyncio

    from crust.blockdriver.commands import pool_volumes

    assert context.parent is not None
    asyncio.run(pool_volumes.delete(context.parent.params["run_dir"], volume, is_confirmed=yes))
