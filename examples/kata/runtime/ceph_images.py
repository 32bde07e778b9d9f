"""The claims of this host on images of Ceph clusters: taken before QEMU opens one, ended when it has closed it.

A process of its own (`crust.blockdriver.ceph.attach`) sends the requests to a cluster. The key of an image's user
stays in memory for the end of its claim: when a virtual machine has ended, the proxy gives its secrets to nobody. An
image is noted on disk before it is taken (`taken_images`).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from crust.blockdriver.ceph import attach
from crust.blockdriver.ceph.attach import Host, Mode
from crust.core import volumes
from crust.handoff.record import Record
from examples.kata.runtime.taken_images import Taken, TakenImages


@dataclass(frozen=True, slots=True)
class TakenImage:
    """`ports.TakenImage`."""

    key: str = field(repr=False)
    cluster: attach.ImageCalls
    vm_id: str
    is_writer: bool

    async def record(self) -> None:
        """Record the client that has opened it. Those of readers need not be known: they do no harm."""
        if self.is_writer:
            await self.cluster.record(self.vm_id)


class CephImages:
    """The images that virtual machines of this host have, noted in `directory`, and their keys by target path."""

    def __init__(self, host: Host, directory: Path) -> None:
        self._host = host
        self._taken = TakenImages(directory)
        self._keys: dict[volumes.TargetPath, str] = {}

    @asynccontextmanager
    async def taking(
        self, record: Record, key: str, vm_id: str, sandbox: volumes.SandboxId
    ) -> AsyncIterator[TakenImage]:
        """Take the image of a volume that this host has claimed; if the block fails, the caller gives it back.

        Raises the errors of `crust.blockdriver.ceph.attach` and `TakenImages.add`.
        """
        mode = Mode.READERS if record.readonly else Mode.WRITER
        image = _image_of(record)
        self.remember(record.target, key)
        await asyncio.to_thread(self._taken.add, Taken(vm_id, sandbox, record.target, image))
        async with attach.asking(attach.Key(image, key)) as cluster:
            await cluster.take(mode, self._host, sandbox, vm_id)
            yield TakenImage(key, cluster, vm_id, mode is Mode.WRITER)

    def taken(self) -> Sequence[Taken]:
        """The images that virtual machines, also ended ones, may have; blocks."""
        return self._taken.all()

    def knows(self, target: volumes.TargetPath) -> bool:
        """Whether the key for a volume's image is known."""
        return target in self._keys

    def remember(self, target: volumes.TargetPath, key: str) -> None:
        """Keep the key for the end of the claim."""
        self._keys[target] = key

    async def size_bytes(self, record: Record) -> int:
        """The image's size now. Raises the errors of `crust.blockdriver.ceph.attach`."""
        key = attach.Key(_image_of(record), self._keys[record.target])
        async with attach.asking(key) as cluster:
            return await cluster.size_bytes()

    async def give_back(self, taken: Taken) -> None:
        """End the claim on the image. Raises the errors of `crust.blockdriver.ceph.attach`; then note and key are
        kept."""
        key = attach.Key(taken.image, self._keys[taken.target])
        async with attach.asking(key) as cluster:
            await cluster.give_back(taken.vm_id)
        await self.forget(taken)

    async def forget(self, taken: Taken) -> None:
        """Nothing is left to be done for it, or nothing can be done."""
        await asyncio.to_thread(self._taken.remove, taken.vm_id, taken.target)
        self._keys.pop(taken.target, None)


def _image_of(record: Record) -> volumes.NetworkImage:
    assert record.image is not None
    return record.image
