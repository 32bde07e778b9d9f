"""What crashes and failed calls have left of volumes and snapshots is removed, each hour and when an engine opens.

    half made or half removed    the engine ends it as removed (`Provisioning.settle`)
    image without a record       kept, and reported as health: the record was lost, not the data
    record without an image      kept, and reported as health

Each is an operation of its volume or set, so it never runs beside another call for it: one that a call works on is
passed over. What cannot be settled is tried again an hour later.
"""

import logging
from dataclasses import dataclass

from crust.blockdriver.engines.protocol import Provisioning
from crust.blockdriver.records.models import VolumeRecord
from crust.blockdriver.records.records import IndexedRecords
from crust.core import errors, operations, volumes
from crust.host.process import workers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Settlement:
    """Ends unfinished volumes and snapshot sets."""

    driver: volumes.DriverName
    volume_records: IndexedRecords[VolumeRecord]
    provisioning: Provisioning
    running: operations.KeyedOperations

    async def collect(self) -> None:
        """Settle all that no call works on."""
        for thing_id in await workers.run(self.provisioning.unsettled):
            await self._settle(thing_id)

    async def _settle(self, thing_id: volumes.VolumeId) -> None:
        key, what = (
            volumes.VolumeKey(self.driver, thing_id),
            "removal of an unfinished volume or set",
        )
        try:
            await self.running.run(key, what, None, lambda: workers.run(self._settle_now, thing_id))
        except operations.OperationInProgress:
            return
        except errors.CrustError as err:
            _log.warning("an unfinished volume or set stays", extra={"id": thing_id, "error": err})

    def _settle_now(self, thing_id: volumes.VolumeId) -> None:
        try:
            self.provisioning.settle(thing_id)
        finally:
            if self.volume_records.is_id(thing_id):  # a removal may have been taken back
                self.volume_records.look_again(thing_id)
