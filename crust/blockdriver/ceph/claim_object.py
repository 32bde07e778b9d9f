"""The claims on an image, as one object beside it: read and replaced atomically.

The object `crust.claim.<image>` lies in the image's own namespace, where a node's user may write. It has two omap
keys: `cookie`, which every write replaces by a new random one, and `claims`, one JSON object. A write is one
operation of RADOS (`omap.swap`) that requires the cookie that was read, or that there is no object: of two writers
one wins, and the other learns it. The time of a claim is for people; nothing is decided by a clock.

RBD's own exclusive lock is no claim: librbd hands it to the next writer, without a question.

A holder is among the holders, or among the ended, or nowhere. Only `crust.blockdriver.ceph.fencing.cut_off` removes
an ended holder.
"""

import enum
import errno
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import pydantic

from crust.blockdriver import schema
from crust.blockdriver.ceph import omap
from crust.blockdriver.ceph.binding import Ioctx, ignoring, load
from crust.core import errors

PREFIX = "crust.claim."
SCHEMA = 1
_HOST = "krbd/"
_DELETION = "deletion"
_COOKIE, _CLAIMS = "cookie", "claims"
_FORM = pydantic.ConfigDict(extra="forbid")
_TRIES = 20
"""The tries of one change before other writers: more of them mean a fault."""


class Mode(enum.Enum):
    """The use of an image: by one writer, by readers alone, or by writers that know of each other (a raw volume,
    ReadWriteMany), at most one on each host.
    """

    WRITER = "writer"
    READERS = "readers"
    SHARED = "shared"


class UnreadableImageClaim(errors.Corrupt):
    def __init__(self, image: str, why: str) -> None:
        super().__init__(
            f"the claims on the image {image} cannot be read",
            why=why,
            hint=f"see `rados listomapvals {PREFIX}{image}`; upgrade crust if a newer version wrote it",
        )


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of an image: a sandbox on a node, or the node's own kernel.

    `id` names the virtual machine, which a restarted runtime still knows, or the node's boot. `machine` is the node's
    machine id, which distinguishes two hosts with one name. `address` is the client that opened the image; empty
    until it is known, and until then it cannot write.
    """

    __pydantic_config__ = _FORM
    id: Annotated[str, pydantic.Field(min_length=1)]
    node: str
    machine: str
    sandbox: str
    claimed_at: str
    address: str = ""

    @classmethod
    def of_host(cls, node: str, machine: str, boot: str, claimed_at: str) -> "Holder":
        """A node's kernel, which has mapped the image since this boot."""
        return cls(f"{_HOST}{boot}/{node}", node, machine, "(none: krbd)", claimed_at)

    @classmethod
    def of_deletion(cls, claimed_at: str) -> "Holder":
        """The controller, which deletes the volume: nobody takes the image from then on."""
        return cls(_DELETION, "", "", "(none: deletion)", claimed_at)

    @property
    def is_deletion(self) -> bool:
        return self.id == _DELETION

    @property
    def is_host(self) -> bool:
        """Whether it is a node's kernel, and no virtual machine."""
        return self.id.startswith(_HOST)

    @property
    def shown(self) -> str:
        if self.is_deletion:
            return "the controller, which deletes the volume,"
        if self.is_host:
            return f"the kernel of node {self.node}"
        return f"sandbox {self.sandbox} on node {self.node}"

    def is_on(self, node: str, machine: str) -> bool:
        """Whether the holder is, or was, on this host; false without a known machine id."""
        return bool(machine) and (self.node, self.machine) == (node, machine)


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims on one image.

    `ended` are holders whose process has ended without closing the image, or whose node was declared gone. Writes of
    their clients may still arrive, so nobody may take the image until they are cut off (`fencing`).
    """

    __pydantic_config__ = _FORM
    mode: Mode = Mode.WRITER
    holders: tuple[Holder, ...] = ()
    ended: tuple[Holder, ...] = ()
    schema: int = SCHEMA

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes of the holders and of the ended holders."""
        holders = (*self.holders, *self.ended)
        return frozenset(holder.node for holder in holders if not holder.is_deletion)


_STORED = pydantic.TypeAdapter(Claims)


@dataclass(frozen=True, slots=True)
class Read:
    """The claims as read; `cookie` is empty if there is no object."""

    cookie: str
    claims: Claims


def read(ioctx: Ioctx, image: str) -> Read:
    """The claims on an image. Raises `UnreadableImageClaim`, and the binding's own errors."""
    with ignoring(errno.ENOENT):
        stored = omap.read_keys(ioctx, PREFIX + image, (_COOKIE, _CLAIMS))
        if set(stored) != {_COOKIE, _CLAIMS}:
            raise UnreadableImageClaim(image, f"it has the keys {sorted(stored)}")
        try:
            claims = schema.read(_STORED.validate_json, stored[_CLAIMS], SCHEMA)
        except schema.Unreadable as err:
            raise UnreadableImageClaim(image, str(err)) from None
        return Read(stored[_COOKIE].decode("ascii"), claims)
    return Read("", Claims())


def changed(ioctx: Ioctx, image: str, change: Callable[[Claims], Claims]) -> Claims:
    """Change the claims on an image, and return the new claims; `change` is called again if another writer was first.

    Without holders, living or ended, the object is removed.
    """
    for _ in range(_TRIES):
        present = read(ioctx, image)
        after = change(present.claims)
        if after == present.claims:
            return after
        stored: dict[str, bytes | None] | None = None
        if after.holders or after.ended:
            cookie = secrets.token_hex(16).encode()
            stored = {_COOKIE: cookie, _CLAIMS: _STORED.dump_json(after)}
        expected = {_COOKIE: present.cookie} if present.cookie else None
        with ignoring(errno.ENOENT):  # another writer has removed it
            if omap.swap(ioctx, PREFIX + image, expected, stored):
                return after if stored else Claims()
    raise errors.NotReady.named(
        "ImageClaimContended",
        f"the claims on the image {image} are not changed",
        why=f"other writers were first {_TRIES} times in a row",
    )


def images(ioctx: Ioctx) -> tuple[str, ...]:
    """The images of the namespace that have a claim object, by one call for each image, 0.3 ms.

    A listing of all objects would take longer: an image has one object for each 4 MiB.
    """
    claimed = []
    for image in load().images.list2(ioctx):
        name = str(image["name"])
        with ignoring(errno.ENOENT):
            ioctx.stat(PREFIX + name)
            claimed.append(name)
    return tuple(claimed)
