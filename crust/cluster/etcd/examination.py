"""Looks at the store from outside of a daemon, with its settings: members, versions, access, certificate.

It only reads. What access control there is shows in what is refused: a key outside of the prefix must be.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from datetime import datetime

from crust.cluster.etcd import connect, records
from crust.cluster.etcd.client import certificates, failures, writes
from crust.cluster.etcd.client.certificates import Files
from crust.cluster.etcd.client.client import Broken, Client
from crust.cluster.etcd.client.methods import RANGE, STATUS
from crust.cluster.etcd.keys import ANNOUNCE, Keys
from crust.cluster.protocol import StoreUnavailable
from crust.settings.cluster import ClusterSettings
from crust.wire.etcd.v3 import etcd_pb2 as pb

ANSWER_S = 3.0


@dataclass(frozen=True, slots=True)
class SeenMember:
    """One member, as it answered; `problem` is why it did not."""

    address: str
    version: str = ""
    knows_leader: bool = False
    alarms: tuple[str, ...] = ()
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Access:
    """What this certificate's user may read."""

    outside: bool
    """A key that does not begin with the prefix: without access control, or with a role for everything."""
    leader: bool
    """The controllers' keys."""
    node: bool
    """The keys of the node that was asked for."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What was seen. `access` is None if no member can be asked."""

    user: str
    not_after: datetime
    certificate_problems: tuple[str, ...]
    expires_soon: bool
    members: tuple[SeenMember, ...]
    access: Access | None
    access_problem: str = ""
    restored: tuple[str, ...] = ()
    """The nodes whose drivers have run while the store lost its latest history, of those that may be read."""


async def examine(given: ClusterSettings, node_id: str) -> Examination:
    """Look. Raises `StoreCertificateRefused` if the certificate files cannot be used at all."""
    files = Files(given.ca, given.cert, given.key)
    identity = await asyncio.to_thread(certificates.read, files)
    async with connect.client(given) as client:
        members = tuple([await _member(client, number) for number in range(len(client.members))])
        access, problem = await _access(client, Keys(given.prefix), node_id)
        restored = await _restored(client, Keys(given.prefix), node_id, access)
    at = certificates.now()
    return Examination(
        identity.user,
        identity.not_after,
        identity.problems(at),
        identity.expires_soon(at),
        members,
        access,
        problem,
        restored,
    )


async def _member(client: Client, number: int) -> SeenMember:
    member = client.members[number]
    try:
        status = await client.attempt(member, STATUS, pb.StatusRequest(), ANSWER_S)
    except Broken as broken:
        found = broken.failure
        return SeenMember(member.address, problem=found.why, hint=found.hint)
    return SeenMember(member.address, status.version, bool(status.leader), tuple(status.errors))


async def _access(client: Client, keys: Keys, node_id: str) -> tuple[Access | None, str]:
    outside = keys.prefix.rstrip("/").encode()
    try:
        return Access(
            outside=await _may_read(client, outside),
            leader=await _may_read(client, keys.leader),
            node=await _may_read(client, keys.announce(node_id)),
        ), ""
    except StoreUnavailable as problem:
        return None, str(problem)


async def _restored(
    client: Client, keys: Keys, node_id: str, access: Access | None
) -> tuple[str, ...]:
    if access is None or not (access.node or access.leader):
        return ()
    what = "announcements cannot be read"
    own = keys.announce(node_id)
    first, end = keys.nodes() if access.leader else (own, own + b"\0")
    with contextlib.suppress(StoreUnavailable):
        _, kvs = await writes.listing(client, first, end, what=what)
        return tuple(each for kv in kvs if (each := _node_of_restored(keys, kv)))
    return ()


def _node_of_restored(keys: Keys, kv: pb.KeyValue) -> str:
    key = keys.parse(kv.key)
    if key is None or key.kind != ANNOUNCE:
        return ""
    with contextlib.suppress(records.StoreValueInvalid):
        said = records.decode(records.AnnouncementRecord, kv.key, kv.value)
        return key.name if said.restored else ""
    return ""


async def _may_read(client: Client, key: bytes) -> bool:
    """Raises `StoreUnavailable`."""
    try:
        await client.call(RANGE, pb.RangeRequest(key=key), ANSWER_S, what="access cannot be tried")
    except failures.StoreAccessDenied:
        return False
    return True
