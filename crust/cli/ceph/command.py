"""`crust ceph`: who has the images of a pool, cutting off a node that is gone, and a user for one volume."""

import sys
from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option(
        "--monitors",
        required=True,
        help="As mon_host has them, e.g. [v2:192.0.2.1:3300,v1:192.0.2.1:6789].",
    ),
    click.option(
        "--user", required=True, help="Without `client.`; its key comes by standard input."
    ),
    click.option("--pool", required=True),
    click.option("--namespace", default="", help="Default: the pool's own."),
)


def _of_pool(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group()
def ceph() -> None:
    """Volumes in a Ceph cluster: who has them, and what to do if a node is gone.

    The key of the user comes by standard input: `ceph auth get-key client.crust | crust ceph claims …`.
    """


@ceph.command()
@_of_pool
def claims(**where: str) -> None:
    """List the images that sandboxes have: node, sandbox, client, and since when.

    Exit codes: 0 listed, 1 the cluster refuses or does not answer, 2 the command cannot be understood.
    """
    from crust.cli.ceph import claimed_images

    claimed_images.listed(claimed_images.PoolAccess(**where, key=_key()))


@ceph.command()
@click.argument("node")
@click.option("--image", default="", help="This image alone. Default: all that the node has.")
@click.option(
    "--even-if-connected",
    is_flag=True,
    help="Also a client that is connected to the cluster, whose virtual machine therefore runs: it loses its disk.",
)
@_of_pool
def fence(node: str, image: str, *, even_if_connected: bool, **where: str) -> None:
    """Declare NODE gone: its clients are blocklisted for years, and its images are free for other nodes.

    The user needs the capability mon 'profile rbd'. A command that was interrupted is repeated.

    Exit codes: 0 the node has no image any more, 1 it had none or could not be cut off, 2 the command cannot be
    understood.
    """
    from crust.cli.ceph import claimed_images

    found = claimed_images.PoolAccess(**where, key=_key())
    sys.exit(claimed_images.fenced(found, node, image, even_if_connected=even_if_connected))


@ceph.command()
@click.argument("volume")
@_of_pool
def caps(volume: str, **where: str) -> None:
    """Print the capabilities of a user that can use VOLUME and read no other volume's data.

    `ceph auth get-or-create client.NAME mon 'allow r' osd "$(… | crust ceph caps VOLUME …)"` makes the user. That of
    a volume that was restored or cloned may read what it shares with its source.

    Exit codes: 0 printed, 1 there is no such volume or the cluster refuses, 2 the command cannot be understood.
    """
    from crust.cli.ceph import claimed_images

    claimed_images.capabilities(claimed_images.PoolAccess(**where, key=_key()), volume)


def _key() -> str:
    key = sys.stdin.readline().strip()
    if not key:
        raise click.UsageError(
            "the user's key is not on standard input: `ceph auth get-key client.<user> | crust ceph …`"
        )
    return key
