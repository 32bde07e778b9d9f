"""The work of `crust ceph`: it reads and changes the claims on the images of one namespace."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import click

from crust.blockdriver.ceph import binding, claim_object, cluster_image, fencing
from crust.blockdriver.ceph.connection import Connection
from crust.blockdriver.ceph.user import CephUser
from crust.blockdriver.engines.rbd import pool
from crust.core import errors
from crust.inspection import refusals


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """A namespace of a pool, and the user of the command."""

    monitors: str
    user: str
    pool: str
    namespace: str
    key: str = field(repr=False)

    @contextmanager
    def opened(self, error_text: str) -> Iterator[tuple[Connection, binding.Ioctx]]:
        """The connection and the namespace. Raises as `Connection`."""
        with (
            closing(Connection(CephUser(self.monitors, self.user, self.key))) as connection,
            connection.pool(self.pool, self.namespace, error_text) as ioctx,
        ):
            yield connection, ioctx


def listed(access: PoolAccess) -> None:
    with access.opened("cannot list the claims") as (_, ioctx):
        for image in sorted(claim_object.images(ioctx)):
            claims = claim_object.read(ioctx, image).claims
            for claim in (*claims.holders, *claims.ended):
                address = claim.address or "not opened yet"
                holder = "krbd" if claim.is_host else f"sandbox {claim.sandbox}"
                state = " ended, to be cut off" if claim in claims.ended else ""
                click.echo(
                    f"{image}  {claims.mode.value}  node {claim.node}  {holder}  {address}  "
                    f"since {claim.claimed_at}{state}"
                )


def fenced(access: PoolAccess, node: str, image: str, *, even_if_connected: bool) -> int:
    """Cut the node off from the image, or from all its images; returns the exit code."""
    failure: errors.CrustError | None = None
    claimants: set[str] = set()
    with access.opened("cannot fence") as (connection, ioctx):
        for name in [image] if image else sorted(claim_object.images(ioctx)):
            try:
                nodes = claim_object.read(ioctx, name).claims.nodes
                claimants |= nodes
                if node not in nodes:
                    continue
                claimed = cluster_image.ClusterImage(connection, ioctx, name)
                cut = fencing.fence(claimed, node, even_if_connected=even_if_connected)
            except errors.CrustError as error:
                refusals.tell(error)
                failure = error
                continue
            click.echo(f"{name}: free; blocklisted {', '.join(cut) or 'no client'}")
    if node not in claimants:
        raise errors.NotFound.named(
            "NodeWithoutClaim",
            f"node {node} has no claim on {f'the image {image}' if image else 'any image'}",
            why=f"claims are of {', '.join(sorted(claimants)) or 'no node'}",
        )
    return int(failure is not None)


def capabilities(access: PoolAccess, image: str) -> None:
    """Print the capabilities of a user for one image. Raises CephImageMissing."""
    error_text = f"cannot look at {image}"
    with (
        access.opened(error_text) as (connection, _),
        cluster_image.reached(
            connection, access.pool, access.namespace, image, error_text
        ) as opened,
    ):
        click.echo(pool.capabilities(opened.ioctx, access.pool, access.namespace, image))
