"""What a start undoes of freezes that a killed driver had made."""

from dataclasses import dataclass

from crust.blockdriver.snapshots.freeze_intents import Intents
from crust.blockdriver.snapshots.guest_freeze import GuestFreezer
from crust.blockdriver.snapshots.host_freeze import Freezer


@dataclass(frozen=True, slots=True)
class FreezeRecovery:
    """Called once, before the first RPC is served. Blocks."""

    intents: Intents
    freezer: Freezer
    guest_freezer: GuestFreezer

    def thaw(self) -> None:
        """Before everything else: writers wait, and a later step may keep the driver from starting."""
        for left in self.intents.open():
            if not left.target:
                self.freezer.thaw_mounted(left)

    def open(self) -> None:
        """Thaw what only the engine finds. After the engine opened.

        What is frozen in guests is thawed by `guest_freezer.recover`, which needs the proxy and may have to wait.
        """
        for left in self.intents.open():
            if left.target:
                self.guest_freezer.remember(left)
            else:
                self.freezer.thaw_unmounted(left)
