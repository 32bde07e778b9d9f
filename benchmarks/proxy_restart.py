"""How long a killed proxy is unavailable, and how much memory it uses, with 1,000 entries and with none.

The proxy is killed with -9 and started again, on a directory of 1,000 entries and on an empty one in turn. Its time
runs from the kill to the first answer through proxy, shim and driver, by a new connection of the CO; and to the
handler's new session, which its SDK gets by itself. Python's own start is in it. The entries are valid records of
volumes that do not exist: the proxy reads them, and makes no calls about them by itself.
"""

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import figures, inotify, node, records
from crust.handoff.store import Store
from crust.runtime_handler.registration import Registration
from examples.kata.demo.node import NodePaths

NAME = "restart"
ROUNDS = 15
ENTRIES = 1000
GOAL_S, GOAL_MIB = 2.0, 120.0
SERVES = "kill -9 until it serves"
REGISTERED = "kill -9 until the handler is registered again"
RESIDENT = "resident memory"

Measured = figures.Collector[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds and MiB by quantity and number of entries."""

    samples: dict[tuple[str, int], figures.Samples]

    def report(self) -> figures.Report:
        """The figures against the two goals."""
        serves, resident = self.samples[SERVES, ENTRIES], self.samples[RESIDENT, ENTRIES]
        return figures.Report(
            name=NAME,
            ways=("0 entries", f"{ENTRIES:,} entries"),
            title=f"The proxy killed and started, with {ENTRIES:,} entries",
            method=f"{ROUNDS} times with {ENTRIES:,} entries and {ROUNDS} times with none, in turn.",
            rows=tuple(
                figures.Row(
                    _label(quantity, entries), samples, "" if entries == 0 else _label(quantity, 0)
                )
                for (quantity, entries), samples in self.samples.items()
            ),
            goals=(
                figures.at_most(
                    f"{ENTRIES:,} entries: serving again in less than {GOAL_S:.0f} s (99th percentile)",
                    serves.p99,
                    GOAL_S,
                    "s",
                ),
                figures.at_most(
                    f"{ENTRIES:,} entries: resident memory below {GOAL_MIB:.0f} MiB",
                    resident.p99,
                    GOAL_MIB,
                    "MiB",
                ),
            ),
            if_missed="calls are repeated meanwhile, and running sandboxes not affected; memory is a cost of a node",
            meaning=(
                "A restart is mostly Python loading its modules; reading the entries adds "
                f"{serves.median - self.samples[SERVES, 0].median:.2f} s. Running sandboxes are not affected."
            ),
        )


async def measure() -> Result:
    """Measure on a node of its own."""
    with node.directories() as paths:
        roots = {0: paths.crust_run / "none", ENTRIES: paths.crust_run / "many"}
        await asyncio.to_thread(_fill, roots[ENTRIES])
        async with AsyncExitStack() as stack:
            for name in ("driver", "shim"):
                process = await node.start(paths, name)
                stack.push_async_callback(process.stop)
            await node.wait_until_serving(paths.driver_socket)
            await node.wait_until_serving(paths.shim_socket)
            session = await stack.enter_async_context(node.registered(paths))
            measured = Measured()
            for _ in range(ROUNDS):
                for entries, root in roots.items():
                    await _restart(paths, root, entries, session, measured)
    samples = {
        (quantity, entries): figures.Samples.of("MiB" if quantity == RESIDENT else "s", values)
        for (quantity, entries), values in measured.values.items()
    }
    return Result(samples)


async def _restart(
    paths: NodePaths, root: Path, entries: int, session: Registration, measured: Measured
) -> None:
    """Start a proxy, kill it once it serves, and time the start of the next one."""
    first = await node.start(paths, "proxy", volumes_root=root)
    try:
        await node.wait_until_serving(paths.csi_socket)
        await session.registered.wait()
    finally:
        killed_s = time.monotonic()
        await first.kill()
    await session.lost.wait()
    with inotify.times_of(os.path.dirname(paths.csi_socket), inotify.CREATED) as bound:
        proxy = await node.start(paths, "proxy", volumes_root=root)
        # Not by a call that waits for the server: its channel would only reconnect at its next attempt.
        async with asyncio.timeout(node.START_TIMEOUT_S):
            await bound.get()
    try:
        await node.wait_until_serving(paths.csi_socket)
        measured.add((SERVES, entries), time.monotonic() - killed_s)
        await session.registered.wait()
        measured.add((REGISTERED, entries), time.monotonic() - killed_s)
        measured.add((RESIDENT, entries), _resident_mib(proxy.running.pid))
    finally:
        await proxy.stop()
        await session.lost.wait()


def _resident_mib(pid: int) -> float:
    """VmRSS of proc(5)."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return int(kib) / 1024


def _fill(root: Path) -> None:
    store = Store(str(root))
    store.open()
    for number in range(ENTRIES):
        store.write(records.record(number))


def _label(quantity: str, entries: int) -> str:
    return f"{quantity}, {entries:,} entries"
