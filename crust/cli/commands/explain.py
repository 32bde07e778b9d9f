"""`crust explain`."""

import click

from crust.inspection.options import RUN_DIR


@click.command("explain")
@click.argument("name", required=False)
@click.option("--volume", help="Why this volume is deferred, by its id, and where it is.")
@click.option("--target", help="Why the volume at this target path is deferred.")
@RUN_DIR
def command(name: str | None, volume: str | None, target: str | None, run_dir: str) -> None:
    """Explain an error: its meaning, its retries and its remedy: `crust explain MountFailed`.

    With --volume or --target: the rule that decided that a volume is deferred.
    """
    if [name, volume, target].count(None) != 2:
        raise click.UsageError("give the name of an error, or --volume, or --target")
    if name is not None:
        from crust.cli import explain

        explain.print_page(name)
        return
    import asyncio

    from crust.cli import decisions

    asyncio.run(decisions.volume(run_dir, volume=volume or "", target=target or ""))
