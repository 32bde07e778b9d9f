"""`crust ceph`: the claims on the images of a pool, fencing of a lost node, and a user for one volume."""

import sys
from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option(
        "--monitors",
        required=True,
        help="The addresses, as in mon_host, e.g. [v2:192.0.2.1:3300,v1:192.0.2.1:6789].",
    ),
    click.option(
        "--user", required=True, help="User, without `client.`; its key comes by standard input."
    ),
    click.option("--pool", required=True),
    click.option("--namespace", default="", help="Default: the pool's own."),
)


def _of_pool(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.group("ceph")
def command() -> None:
    """Show the claims on volumes in a Ceph cluster, and fence a lost node.

    The key of the user comes by standard input: `ceph auth get-key client.crust | crust ceph claims …`.
    """


@command.command()
@_of_pool
def claims(**access: str) -> None:
    """List the images that sandboxes have, with node, sandbox, client and time of the claim.

    Exit codes: 0 listed, 1 the cluster refuses or does not answer, 2 the command cannot be understood.
    """
    from crust.blockdriver.commands import claimed_images

    claimed_images.listed(claimed_images.PoolAccess(**access, key=_key()))


@command.command()
@click.argument("node")
@click.option("--image", default="", help="Only this image. Default: all images of the node.")
@click.option(
    "--even-if-connected",
    is_flag=True,
    help="Fence also a connected client: its virtual machine runs, and loses its disk.",
)
@_of_pool
def fence(node: str, image: str, *, even_if_connected: bool, **access: str) -> None:
    """Declare NODE gone: its clients are blocklisted for years, and its images are free for other nodes.

    The user needs the capability mon 'profile rbd'. Repeat an interrupted command.

    Exit codes: 0 the node has no image any more, 1 it had no image or could not be fenced, 2 the command cannot be
    understood.
    """
    from crust.blockdriver.commands import claimed_images

    pool_access = claimed_images.PoolAccess(**access, key=_key())
    sys.exit(claimed_images.fenced(pool_access, node, image, even_if_connected=even_if_connected))


@command.command()
@click.argument("volume")
@_of_pool
def caps(volume: str, **access: str) -> None:
    """Print the capabilities of a user that can use VOLUME and read no other volume's data.

    `ceph auth get-or-create client.NAME mon 'allow r' osd "$(… | crust ceph caps VOLUME …)"` makes the user. The
    user of a restored or cloned volume may also read the data that the volume shares with its source.

    Exit codes: 0 printed, 1 the volume does not exist or the cluster refuses, 2 the command cannot be understood.
    """
    from crust.blockdriver.commands import claimed_images

    claimed_images.capabilities(claimed_images.PoolAccess(**access, key=_key()), volume)


def _key() -> str:
    key = sys.stdin.readline().strip()
    if not key:
        raise click.UsageError(
            "the user's key is not on standard input: `ceph auth get-key client.<user> | crust ceph …`"
        )
    return key
