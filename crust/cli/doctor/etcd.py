"""The store of a cluster: its members, their versions, who may read what, and the certificate of this node.

Access control is tried, not read: a certificate that may read outside of the cluster's prefix may do everything.
"""

import asyncio
from collections.abc import Iterator

from crust.cli.doctor.finding import Finding, error, ok, warning
from crust.cluster.etcd import examination
from crust.cluster.etcd.client import versions
from crust.cluster.etcd.examination import Examination, SeenMember
from crust.settings.cluster import ClusterSettings

_PAGE = "docs/etcd.md"


def findings(given: ClusterSettings, node_id: str, *, is_node: bool) -> Iterator[Finding]:
    """What there is to say of the store for a node, or else a controller. Blocks.

    Raises `StoreCertificateRefused` if the certificate's files cannot be used at all.
    """
    seen = asyncio.run(examination.examine(given, node_id))
    yield _certificate(seen)
    for member in seen.members:
        yield from _member(member)
    yield from _holes(seen)
    yield from _access(seen, node_id, is_node=is_node)
    yield from _restored(seen)


def _certificate(seen: Examination) -> Finding:
    who = f"the certificate of {seen.user or 'nobody'} for etcd"
    todo = f"issue a new one in place of the file, no restart is needed: {_PAGE}, Certificates"
    if seen.certificate_problems:
        return error(f"{who} will be refused", "; ".join(seen.certificate_problems), todo)
    day = f"{seen.not_after:%Y-%m-%d}"
    if seen.expires_soon:
        why = "open connections go on, the next one fails then"
        return warning(f"{who} expires on {day}", why, todo)
    return ok(f"{who} is valid until {day}")


def _member(member: SeenMember) -> Iterator[Finding]:
    if member.problem:
        yield error(f"etcd at {member.address} cannot be used", member.problem, member.hint)
        return
    if not member.knows_leader:
        yield error(
            f"etcd at {member.address} has no leader",
            "more than half of the members must run and reach each other, else nothing is written",
            "start the other members, and check the network between them",
        )
    for alarm in member.alarms:
        yield error(
            f"etcd at {member.address} has an alarm: {alarm}",
            "a member with an alarm refuses writes",
            f"see {_PAGE}, The store is full",
        )
    if member.knows_leader and not member.alarms:
        yield ok(f"etcd {member.version} at {member.address} answers")


def _holes(seen: Examination) -> Iterator[Finding]:
    for version in sorted({each.version for each in seen.members if each.version}):
        found = versions.holes(version)
        if not found:
            yield ok(f"no hole in the access control of etcd {version} is known here")
            continue
        yield warning(
            f"the access control of etcd {version} has holes: {', '.join(each.name for each in found)}",
            "; ".join(each.what for each in found),
            "run 3.5.33, 3.6.14 or later; until then a node that is taken over can disturb the others",
        )


def _restored(seen: Examination) -> Iterator[Finding]:
    if not seen.restored:
        return
    some = ", ".join(seen.restored[:3]) + (", ..." if len(seen.restored) > 3 else "")
    yield warning(
        f"etcd was restored from a backup, or replaced, since the start of {some}",
        "what was written last is lost there; names come back from the pools, retirements do not",
        "compare `crust cluster nodes`, and retire again what is gone for good: "
        "docs/multi-node.md, Restore etcd from a backup",
    )


def _access(seen: Examination, node_id: str, *, is_node: bool) -> Iterator[Finding]:
    access = seen.access
    roles = f"see {_PAGE}, Users and roles"
    if access is None:
        yield error("access to etcd was not tried", seen.access_problem, "correct the above first")
    elif access.outside:
        yield error(
            f"{seen.user} may read all of etcd",
            "access control is not enabled, or the user has a role for everything: any node can write any key",
            f"etcdctl auth enable; {roles}",
        )
    elif not access.node:
        yield error(
            f"{seen.user} may not read what node {node_id} writes", "its role lacks it", roles
        )
    elif is_node and access.leader:
        yield error(
            f"{seen.user} may read what the controller writes",
            "a node needs its own directory alone, and this one can speak for all of them",
            roles,
        )
    else:
        yield ok(f"{seen.user} may read its part of etcd, and not the rest")
