"""A process that publishes entries on command and prints the time of the rename: the proxy's part in `watch_latency`.

A line on standard input is `publish` or `unpublish`, the directory's root, and a volume's number; the answer is the
monotonic clock in nanoseconds, which is the same clock in every process, just before the last rename.
"""

import os
import sys
import time

from benchmarks import records
from crust.handoff.store import Store

_rename = os.rename


class _Clock:
    """Records the time of the last rename, which makes the entry visible at the end of `Store.publish`."""

    last_ns = 0

    def rename(self, source: str, destination: str) -> None:
        """rename(2), with its time recorded."""
        self.last_ns = time.monotonic_ns()
        _rename(source, destination)


def main() -> None:
    """Serve until standard input ends."""
    clock = _Clock()
    os.rename = clock.rename  # type: ignore[assignment]
    for line in sys.stdin:
        command, root, number = line.split()
        store, record = Store(root), records.record(int(number))
        if command == "publish":
            store.write(record)
        else:
            with store.begin_removal(record.target) as alone:
                alone.complete()
        print(clock.last_ns, flush=True)


if __name__ == "__main__":
    main()
