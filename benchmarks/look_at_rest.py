"""The cost of the proxy's look at the handoff directory at rest, with 1,000 entries: unclaimed, and all claimed.

A look happens every few seconds, so its processor time is given as a part of one core. Nothing changes meanwhile. The
entries are valid records of volumes that do not exist.
"""

import asyncio
import resource
import time
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks import figures, node, records
from crust.core.operations import KeyedOperations
from crust.core.supervised import Health
from crust.handoff import claims, entry
from crust.handoff.store import Store
from crust.handoff.watch import RESCAN_S
from crust.host.block import devices
from crust.host.files.locks import ToolLocks
from crust.host.process.workers import Workers
from crust.proxy.filesystems import Filesystems
from crust.proxy.guard import Targets
from crust.proxy.look import Reconciler
from crust.proxy.table import Entries, Events, Table

NAME = "look"
ENTRIES = 1000
ROUNDS = 50
GOAL_PERCENT = 0.2
REST, CLAIMED = "no entry is claimed", "every entry is claimed"

Measured = figures.Collector[str]


@dataclass(frozen=True, slots=True)
class Result:
    """Percent of a core, by state of the entries."""

    samples: dict[str, figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the goal."""
        return figures.Report(
            name=NAME,
            title=f"A look at {ENTRIES:,} entries at rest",
            method=f"{ROUNDS} looks each; processor time of a look, as a part of the {RESCAN_S:g} s between two.",
            rows=tuple(figures.Row(state, samples, "") for state, samples in self.samples.items()),
            goals=tuple(
                figures.at_most(
                    f"{state}: less than {GOAL_PERCENT} % of a core",
                    samples.median,
                    GOAL_PERCENT,
                    "%",
                )
                for state, samples in self.samples.items()
            ),
            costs=tuple(
                (
                    f"{ENTRIES:,} deferred volumes at rest: {state}",
                    f"{samples.median:.2f} % of a core",
                )
                for state, samples in self.samples.items()
            ),
            if_missed="it is a cost of a node, and no call waits for it",
            meaning="A look lists the directory, queries the locks of claims, and reads a few entries in turn.",
        )


async def measure() -> Result:
    """Measure in this process, as the proxy's watch calls it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the locks of the claims
    measured = Measured()
    with node.run_directory() as root, ExitStack() as held:
        store = Store(f"{root}/volumes")
        store.open()
        targets = [
            store.create(records.record(number)).require().target for number in range(ENTRIES)
        ]
        table = Table()
        filesystems = Filesystems(ToolLocks(root))
        entries = Entries(
            store,
            table,
            Targets([str(root)]),
            filesystems,
            devices,
            KeyedOperations(Workers("the look")),
            Events(),
            Health(),
        )
        reconciler = Reconciler(entries)
        await _look_at_rest(reconciler, measured, REST)
        for target in targets:
            held.enter_context(claims.ClaimLock.acquire(store.layout.entry(target), target))
            claims.touch(store.layout.entry(target))
        await _look_at_rest(reconciler, measured, CLAIMED)
    return Result(
        {state: figures.Samples.of("%", values) for state, values in measured.values.items()}
    )


async def _look_at_rest(reconciler: Reconciler, measured: Measured, state: str) -> None:
    await reconciler.look()
    await asyncio.sleep(2 * entry.FRESH_NS / 1e9)  # until the entries are old enough to be believed
    await reconciler.look()
    for _ in range(ROUNDS):
        began_s = time.process_time()
        await reconciler.look()
        measured.add(state, 100 * (time.process_time() - began_s) / RESCAN_S)
