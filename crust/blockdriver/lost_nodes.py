"""What nodes that are gone have claimed is cut off and freed, while nobody asks: pods that wait for it go on.

Who is gone, `nodes` says, which is asked again before each pass; it never means that a node did not answer. Even so
a client that is connected is alive and is left alone (`fencing.HolderConnected`); the pass is repeated until it has
ended, or the node is not declared gone any more. A pass reads the claim of each volume: 0.4 ms.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from crust.blockdriver.engines.protocol import NodeFencing
from crust.core import errors, metrics, volumes
from crust.host.process import workers

PERIOD_S = 30.0
"""The cluster lists a client that was switched off as connected for as long."""

_log = logging.getLogger(__name__)


class NodesGone(Protocol):
    """Who knows which nodes are gone for good."""

    async def ids(self) -> frozenset[str]:
        """The driver's ids of those nodes, now."""
        ...


@dataclass(frozen=True, slots=True)
class LostNodes:
    """The nodes that `declared` calls gone, and what cuts them off from the volumes that `volume_ids` lists."""

    fencing: NodeFencing
    declared: NodesGone
    volume_ids: Callable[[], Iterable[volumes.VolumeId]]
    period_s: float = PERIOD_S

    async def keep_fencing(self) -> None:
        """Fence what nodes that are gone have claimed, until cancelled; `supervised` begins it again.

        Nodes that wait go on waiting in the metric, whatever a pass fails with.
        """
        while True:
            try:
                waiting = await self._fence()
            except errors.CrustError as err:
                metrics.fencing_failures.inc()
                _log.warning("nodes that are gone are not fenced", extra={"error": err})
            except Exception:
                metrics.fencing_failures.inc()
                raise
            else:
                metrics.nodes_waiting_for_fencing.set(len(waiting))
            await asyncio.sleep(self.period_s)

    async def _fence(self) -> frozenset[str]:
        """One pass; the nodes that wait for the next. Raises what `declared` and the engine raise."""
        gone = await self.declared.ids()
        if not gone:
            return frozenset()
        return await workers.run(self.fencing.fence, self.volume_ids(), gone)
