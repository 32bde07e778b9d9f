"""The claims of this host on images of Ceph clusters: taken before QEMU opens one, ended when it has closed it.

What is asked of a cluster is asked by a process of its own (`crust.ceph.attach`). The key of an image's user stays in
memory for the end of its claim: when a virtual machine has ended, the proxy gives its secrets to nobody.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from crust import volumes
from crust.ceph import attach
from crust.ceph.claim_object import Mode
from crust.ceph.claims import Host
from crust.handoff.record import Record


@dataclass(frozen=True, slots=True)
class TakenImage:
    """`ports.TakenImage`."""

    key: str = field(repr=False)
    cluster: attach.Asking
    vm_id: str
    is_writer: bool

    async def record(self) -> None:
        """Record the client that has opened it. Those of readers need not be known: they do no harm."""
        if self.is_writer:
            await self.cluster.record(self.vm_id)


class CephImages:
    """The images that virtual machines of this host have, by target path."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._keys: dict[volumes.TargetPath, str] = {}

    @asynccontextmanager
    async def taking(
        self, record: Record, key: str, vm_id: str, sandbox: volumes.SandboxId
    ) -> AsyncIterator[TakenImage]:
        """Take the image of a volume that this host has claimed; if the block fails, the caller gives it back.

        Raises what `crust.ceph.attach` raises.
        """
        mode = Mode.READERS if record.readonly else Mode.WRITER
        self.remember(record, key)
        async with attach.asking(_key_of(record, key)) as cluster:
            await cluster.take(mode, self._host, sandbox, vm_id)
            yield TakenImage(key, cluster, vm_id, mode is Mode.WRITER)

    def knows(self, record: Record) -> bool:
        """Whether the key for a volume's image is known."""
        return record.target in self._keys

    def remember(self, record: Record, key: str) -> None:
        """Keep the key for the end of the claim."""
        self._keys[record.target] = key

    async def size_bytes(self, record: Record) -> int:
        """The image's size now. Raises what `crust.ceph.attach` raises."""
        async with attach.asking(_key_of(record, self._keys[record.target])) as cluster:
            return await cluster.size_bytes()

    async def give_back(self, record: Record, vm_id: str) -> None:
        """End the claim on the image. Raises what `crust.ceph.attach` raises; then the key is kept."""
        async with attach.asking(_key_of(record, self._keys[record.target])) as cluster:
            await cluster.give_back(vm_id)
        self._keys.pop(record.target, None)


def _key_of(record: Record, key: str) -> attach.Key:
    assert record.image is not None
    return attach.Key(record.image, key)
