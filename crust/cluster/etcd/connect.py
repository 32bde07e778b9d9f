"""Composes the store of a program from its settings: channels, client, and the side that the program has."""

import contextlib
from collections.abc import AsyncIterator

from crust.cluster.etcd.client.certificates import Files
from crust.cluster.etcd.client.channels import Channels
from crust.cluster.etcd.client.client import Client
from crust.cluster.etcd.controller_side import EtcdControllerSide
from crust.cluster.etcd.keys import Keys
from crust.cluster.etcd.node_side import EtcdNodeSide
from crust.settings.cluster import ClusterSettings


@contextlib.asynccontextmanager
async def client(given: ClusterSettings) -> AsyncIterator[Client]:
    """A client of the members. It connects at the first call, so this does not fail if the store is away."""
    channels = Channels(given.endpoints, Files(given.ca, given.cert, given.key))
    async with channels.opened():
        yield Client(channels)


@contextlib.asynccontextmanager
async def node_side(given: ClusterSettings, node_id: str) -> AsyncIterator[EtcdNodeSide]:
    """The store as the node `node_id` sees it. Its certificate's user needs the node's directory alone."""
    async with client(given) as connected:
        side = EtcdNodeSide(connected, Keys(given.prefix), node_id, given.lease_s)
        async with side.connected():
            yield side


@contextlib.asynccontextmanager
async def controller_side(given: ClusterSettings) -> AsyncIterator[EtcdControllerSide]:
    """The store as a controller sees it."""
    async with client(given) as connected:
        side = EtcdControllerSide(connected, Keys(given.prefix), given.lease_s)
        async with side.connected():
            yield side
