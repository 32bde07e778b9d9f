"""What the shim advertises beside the capabilities of a driver that it wraps, and why a CO must see it.

A CO calls GET_VOLUME_STATS and EXPAND_VOLUME only where they are advertised; a kubelet asks that before each call.

- Both, while a deferred volume is on the node: the shim answers them for it. For other volumes the driver answers, or
  does not, as without the shim.
- EXPAND_VOLUME always, if the plugin says that its volumes can be expanded and its node needs nothing for it: the
  controller's shim requires the node's part for every mounted volume, because it cannot know which ones are deferred.
  A kubelet asks before the first publish too, when nothing of the volume is here.
- Deferral, to a caller that opts in.

Nothing else: VOLUME_MOUNT_GROUP would end the kubelet's own fsGroup for all volumes of the driver.
"""

import os
from collections.abc import Awaitable, Callable, Collection
from typing import TypeAlias

from crust.core import volumes
from crust.csi_shim.wrap.private_directories import PrivatePaths
from crust.rpc.csi_driver import CsiDriver
from crust.rpc.messages import limits
from crust.wire.csi.v1 import csi_pb2

_RPC = csi_pb2.NodeServiceCapability.RPC
_Number: TypeAlias = "csi_pb2.NodeServiceCapability.RPC.Type.ValueType"
_DEFERRAL = (
    _RPC.DEFER_FS_OPS,
    _RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP,
    _RPC.DEFER_FS_OPS_WITH_SUPPLEMENTAL_GROUP_CHANGE_POLICY,
)


class Advertised:
    """The capabilities that the shim adds. `has_volumes` says whether a deferred volume is on the node."""

    def __init__(self, driver: CsiDriver, has_volumes: Callable[[], Awaitable[bool]]) -> None:
        self._driver = driver
        self._has_volumes = has_volumes

    async def beside(
        self, known: Collection[int], *, opted_in: bool, left_s: float | None
    ) -> list[_Number]:
        """What is added to the driver's own, which are `known`. Raises `PeerStatus`.

        Nobody looks for volumes if the driver has both: most have, and a kubelet asks before each call.
        """
        own: list[_Number] = []
        if _RPC.GET_VOLUME_STATS not in known and await self._has_volumes():
            own.append(_RPC.GET_VOLUME_STATS)
        if _RPC.EXPAND_VOLUME not in known and await self.expands(known, left_s):
            own.append(_RPC.EXPAND_VOLUME)
        return own + [each for each in _DEFERRAL if opted_in and each not in known]

    async def expands(self, known: Collection[int], left_s: float | None) -> bool:
        """Whether EXPAND_VOLUME is advertised, by the driver or by the shim."""
        if _RPC.EXPAND_VOLUME in known or await self._has_volumes():
            return True
        return await self._driver.expands_volumes(left_s)


def path_of(request: csi_pb2.NodeExpandVolumeRequest) -> str:
    """The path of an expansion that needs nothing of the node. Raises `InvalidRequest`."""
    limits.volume_id_of_any_driver(request.volume_id)
    return volumes.TargetPath.parse(request.volume_path, role="volume_path").text


def is_there(_: PrivatePaths, path: str) -> bool:
    """Whether there is anything at the path. Blocks."""
    return os.path.lexists(path)
