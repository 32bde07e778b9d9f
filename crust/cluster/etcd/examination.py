"""Looks at the store from outside of a daemon, with its settings: members, versions, access, certificate.

It only reads. What access control there is shows in what is refused: a key outside of the prefix must be.
"""

import asyncio
from dataclasses import dataclass
from datetime import datetime

from crust.cluster.etcd import connect
from crust.cluster.etcd.client import certificates, failures
from crust.cluster.etcd.client.certificates import Files
from crust.cluster.etcd.client.client import Broken, Client
from crust.cluster.etcd.client.methods import RANGE, STATUS
from crust.cluster.etcd.keys import Keys
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


async def examine(given: ClusterSettings, node_id: str) -> Examination:
    """Look. Raises `StoreCertificateRefused` if the certificate files cannot be used at all."""
    files = Files(given.ca, given.cert, given.key)
    identity = await asyncio.to_thread(certificates.read, files)
    async with connect.client(given) as client:
        members = tuple([await _member(client, number) for number in range(len(client.members))])
        access, problem = await _access(client, Keys(given.prefix), node_id)
    at = certificates.now()
    return Examination(
        identity.user,
        identity.not_after,
        identity.problems(at),
        identity.expires_soon(at),
        members,
        access,
        problem,
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


async def _may_read(client: Client, key: bytes) -> bool:
    """Raises `StoreUnavailable`."""
    try:
        await client.call(RANGE, pb.RangeRequest(key=key), ANSWER_S, what="access cannot be tried")
    except failures.StoreAccessDenied:
        return False
    return True
