"""A placeholder in Kata's directory for each volume that is published to one of our handlers.

The placeholder appears with crust's entry, and is removed after it. In between Kata refuses a container, also while
this daemon is away. An entry that stays, because the daemon was away at the unpublish, is harmless: its path has the
pod's UID, and the first look removes it. A real one stays where keepers and virtual machine were killed together.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from crust.core import errors, volumes
from crust.handoff.entry import Looks
from crust.handoff.store import Store
from crust.handoff.watch import RENAMES, Watch
from crust.host.process import workers
from crust.kata import entry

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Placeholders:
    """Keeps Kata's directory in step with the handoff directory."""

    _store: Store
    _entries: entry.KataEntries
    _handlers: Collection[volumes.HandlerName]
    _report: Callable[[str, errors.CrustError | None], None]
    _known: frozenset[str] | None = None

    def __post_init__(self) -> None:
        self._looks = Looks(self._store.layout)

    async def keep(self) -> None:
        """Look until cancelled."""
        async with Watch(self._store.root, kinds=RENAMES) as watch:  # a claim is a touch
            async for _ in watch:
                await workers.run(self.look_at_volumes)

    def look_at_volumes(self) -> None:
        """Look once. Blocks."""
        look = self._looks.look()
        for volume in look.entries.values():
            record = volume.record
            if record is None or record.handler not in self._handlers:
                continue
            problem: errors.CrustError | None = None
            try:
                self._entries.place(entry.name_of(record.target.text), record)
            except errors.CrustError as error:
                _log.error("no placeholder for a volume", extra={"error": error})
                problem = error
            self._report(f"volume {record.target}", problem)
        if self._known is None or self._known - look.names:
            made = list(self._entries.ours())
            published = self._looks.look().names  # after them: an entry is made after its record
            for name, digest in made:
                if digest not in published:
                    self._entries.remove(name)
        self._known = frozenset(look.names)
