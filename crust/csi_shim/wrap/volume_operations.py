"""What the shim does about a volume on the host: operations, one at a time per volume, and looks at its directories.

Operations run on the shim's threads (`crust.host.process.workers`) and outlive their callers. A look is no part of an
operation: it has one thread per question, so that its retries add none where a mount hangs.
"""

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from crust.core import operations
from crust.csi_shim.wrap import private_directories
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.csi_shim.wrap.staging import Volume
from crust.host.process.workers import Workers
from crust.rpc.call import Call
from crust.rpc.messages import requests

T = TypeVar("T")

_LOOK_S = 10.0
"""For a look at a volume's directories, which takes microseconds unless a mount there hangs."""

_OPERATION_S = 120.0
"""After this, callers are told that an operation is overdue: as long as a kubelet waits."""


class VolumeOperations:
    """The operations and looks of one shim, whose volumes are below `kubelet_root`."""

    def __init__(self, kubelet_root: str, threads: Workers) -> None:
        self._root = kubelet_root
        self.operations = operations.KeyedOperations(threads)
        """By volume id."""

    async def run(
        self,
        volume: Volume,
        request: Message,
        call: Call,
        work: Callable[[], Coroutine[Any, Any, T]],
    ) -> T:
        """Do the work of a request as the volume's operation. Raises as `KeyedOperations.run`."""
        return await self.operations.run(
            volume.paths.key.volume_id,
            type(request).__name__.removesuffix("Request"),
            requests.identity(request),
            work,
            limit_s=_OPERATION_S,
            left_s=call.time_remaining(),
        )

    def shared(self, volume_id: str) -> AbstractContextManager[None]:
        """Exclude operations of the volume while a call about it passes. Raises `OperationInProgress`."""
        return self.operations.shared(volume_id)

    async def look(self, volume: Volume, function: Callable[..., bool], *args: object) -> bool:
        """What `function` says of paths of the volume. Raises as `KeyedOperations.look`."""
        return await self.operations.look(
            (function, args),
            partial(function, *args),
            timeout_s=_LOOK_S,
            shown=f"volume {volume.paths.key}",
            fresh=True,
        )

    async def has_volumes(self) -> bool:
        """Whether there are deferred volumes: then the shim advertises what it answers for them."""
        look = partial(private_directories.has_volumes, self._root)
        return await self.operations.look(self._root, look, timeout_s=_LOOK_S, fresh=True)


def is_private(paths: PrivatePaths, target: str, is_deferred: bool) -> bool:  # noqa: FBT001 - by position
    """A look: whether the target is published at a leaf, or may be."""
    if private_directories.has_leaf(paths, target):
        return True
    if private_directories.is_staged(paths):
        return True
    return is_deferred and private_directories.has_publishes(paths)


def is_wrapped(paths: PrivatePaths) -> bool:
    """A look: whether the volume is staged as block, or published so."""
    return private_directories.is_staged(paths) or private_directories.has_publishes(paths)
