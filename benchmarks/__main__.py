"""`python -m benchmarks [NAME…]`: measure, print, and after a full run write docs/benchmarks.md and its plot."""

import argparse
import asyncio
import compileall
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import crust
from benchmarks import (
    brings,
    ceph_guest_io,
    ceph_publish,
    figures,
    first_stage,
    guest_io,
    kata_bridge,
    large_pool,
    look_at_rest,
    machine,
    one_process,
    one_tenant,
    page,
    pass_through,
    plot,
    proxy_restart,
    publish,
    snapshots,
    stage,
    watch_latency,
    wrapped,
)

BENCHMARKS: dict[str, Callable[[], Coroutine[Any, Any, figures.Result]]] = {
    guest_io.NAME: guest_io.measure,
    publish.NAME: publish.measure,
    pass_through.NAME: pass_through.measure,
    one_process.NAME: one_process.measure,
    wrapped.NAME: wrapped.measure,
    watch_latency.NAME: watch_latency.measure,
    proxy_restart.NAME: proxy_restart.measure,
    look_at_rest.NAME: look_at_rest.measure,
    stage.NAME: stage.measure,
    first_stage.NAME: first_stage.measure,
    large_pool.NAME: large_pool.measure,
    snapshots.NAME: snapshots.measure,
    one_tenant.NAME: one_tenant.measure,
    kata_bridge.NAME: kata_bridge.measure,
    ceph_guest_io.NAME: ceph_guest_io.measure,
    ceph_publish.NAME: ceph_publish.measure,
}

STORAGE = "storage"
GROUPS = {STORAGE: (stage.NAME, first_stage.NAME, large_pool.NAME, snapshots.NAME)}
"""Names for several benchmarks; `storage` measures the driver alone."""


def main() -> int:
    """Run the named benchmarks, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*BENCHMARKS, *GROUPS)))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    # as pip installs it: where Python is told to write no byte code, each start would compile crust first
    compileall.compile_dir(Path(crust.__file__).parent, quiet=1)
    names = [benchmark for name in arguments.names for benchmark in GROUPS.get(name, (name,))]
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    arguments.docs.mkdir(parents=True, exist_ok=True)  # now, not after the measurements
    # no warnings of a handler whose proxy is killed on purpose
    logging.basicConfig(level=logging.ERROR)
    reports = [_run(name) for name in names or BENCHMARKS]
    if not names:
        text = page.render(machine.describe(), reports)
        (arguments.docs / "benchmarks.md").write_text(text)
        plot.draw(reports, arguments.docs / "benchmarks.svg")
        brings.draw()
    return 0


def _run(name: str) -> figures.Report:
    print(f"{name} …", file=sys.stderr, flush=True)
    report = asyncio.run(BENCHMARKS[name]()).report()
    print(page.section(report), flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
