"""`crust cluster`: the nodes as the controller sees them, and a node that is gone for good.

The settings are those of `crust driver` in mode controller: the certificate must be a controller's.
"""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crust import errors, pool_ids
from crust.cli.inspecting.commands import FORMAT

if TYPE_CHECKING:
    from crust.cli.output import Format
    from crust.settings.cluster import ClusterSettings

_CONFIG = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The controller's TOML settings. Default: /etc/crust/driver.toml.",
)
_WAIT_S = 10.0


class NoClusterSettings(errors.InvalidRequest):
    """A command about a cluster has no settings that say where its store is."""

    def __init__(self) -> None:
        super().__init__(
            "it is not known where the cluster's etcd is",
            why="there are no settings with a table [cluster]",
            hint="name the controller's settings by --config, in a controller's pod /etc/crust/controller.toml",
        )


@click.group()
def cluster() -> None:
    """The nodes of a cluster with one controller."""


@cluster.command()
@_CONFIG
@FORMAT
def nodes(config: Path | None, form: "Format") -> None:
    """List the nodes and their pools. Exit codes: 0 listed, 1 the store does not answer, 2 bad settings."""
    sys.exit(asyncio.run(_answered(config, lambda store: _nodes(store, form))))


@cluster.command()
@_CONFIG
@click.argument("node", required=False)
@click.option(
    "--pool", help="Instead of NODE: the id of a pool whose node etcd does not know any more."
)
def retire(config: Path | None, node: str | None, pool: str | None) -> None:
    """Declare NODE gone for good, with its pools: its volumes can be deleted, and are never served again.

    Exit codes: 0 retired, 1 refused, or the store does not answer, 2 bad settings.
    """
    if (node is None) == (pool is None):
        raise click.UsageError("name a node, or a pool by --pool")
    if pool is not None and not re.fullmatch(pool_ids.POOL_ID, pool):
        raise click.UsageError("the id of a pool has 16 digits of 0-9 and a-f")
    sys.exit(asyncio.run(_answered(config, lambda store: _retire_named(store, node, pool))))


async def _answered(config: Path | None, command: Callable[[Any], Awaitable[None]]) -> int:
    from crust.cluster.etcd import connect

    try:
        async with connect.controller_side(_settings(config)) as store:
            await store.ready(_WAIT_S)
            await command(store)
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        return 2 if isinstance(error, errors.InvalidRequest) else 1
    return 0


def _settings(config: Path | None) -> "ClusterSettings":
    from crust.cli.programs import daemons
    from crust.settings.driver import DriverSettings

    if config is None and daemons.installed("driver") is None:
        raise NoClusterSettings
    flags = {"config": config, "node_id": "crust-cluster"}
    found = daemons.settings_of(DriverSettings, "driver", flags)
    if found.cluster is None:
        raise NoClusterSettings
    return found.cluster


async def _nodes(store: Any, form: "Format") -> None:
    from crust.cli.inspecting import watching
    from crust.cli.programs import cluster_nodes

    watching.print_once(cluster_nodes.shown(store), form)


async def _retire_named(store: Any, node: str | None, pool: str | None) -> None:
    if node is not None:
        await _retire(store, node)
    elif pool is not None:
        await _retire_pool(store, pool)


async def _retire(store: Any, node: str) -> None:
    pools = await store.retire(node)
    click.echo(f"{node} is retired, with the pools {', '.join(pools)}")


async def _retire_pool(store: Any, pool: str) -> None:
    await store.retire_pool(pool)
    click.echo(f"the pool {pool} is retired")
