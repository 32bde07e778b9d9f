"""Writes the archive, one part after the other."""

import asyncio
from pathlib import Path

import click

from crust import errors
from crust.cli.bundle import archive, parts


def run(path: Path, places: parts.NodeFiles) -> int:
    """Write it; returns the exit code."""
    try:
        count = asyncio.run(write(path, places))
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        return 2 if isinstance(error, errors.InvalidRequest) else 1
    click.echo(f"{path}: {count} files; look at it before you send it: names and paths are in it")
    return 0


async def write(path: Path, places: parts.NodeFiles) -> int:
    """Write it; returns how many files it has. Raises what `archive.writing` does."""
    count = 0
    async with archive.writing(path) as written:
        async for name, data in parts.parts(places):
            await written.add(name, data)
            count += 1
    return count
