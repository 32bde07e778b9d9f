"""What nodes that are gone have claimed is cut off and freed, while nobody asks: pods that wait for it go on.

Who is gone, `nodes` says, which is asked again before each pass; it never means that a node did not answer. Even so
a client that is connected is alive and is left alone (`fencing.HolderConnected`); the pass is repeated until it has
ended, or the node is not declared gone any more. A pass reads the claim of each volume: 0.4 ms.
"""

import asyncio
import logging
from typing import Protocol

from crust import errors
from crust.blockdriver.driver import Driver
from crust.host.process import workers

PERIOD_S = 30.0
"""The cluster lists a client that was switched off as connected for as long."""

_log = logging.getLogger(__name__)


class NodesGone(Protocol):
    """Who knows which nodes are gone for good."""

    async def ids(self) -> frozenset[str]:
        """The driver's ids of those nodes, now."""
        ...


async def keep_fencing(driver: Driver, nodes: NodesGone) -> None:
    """Fence what nodes that are gone have claimed, until cancelled; a failure does not end it."""
    while True:
        try:
            await fence_once(driver, nodes)
        except errors.CrustError as err:
            _log.warning("nodes that are gone are not fenced", extra={"error": err})
        await asyncio.sleep(PERIOD_S)


async def fence_once(driver: Driver, nodes: NodesGone) -> int:
    """One pass; returns how many claims of such nodes are left. Raises what `nodes` and the engine raise."""
    fencing = driver.stores.engine.fencing
    assert fencing is not None, "checked with the settings"
    gone = await nodes.ids()
    if not gone:
        return 0
    volume_ids = driver.stores.volume_records.ids()
    return await workers.run(fencing.fence, volume_ids, gone)
