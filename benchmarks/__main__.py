"""`python -m benchmarks [NAME…]`: measure, print, and after a full run write docs/benchmarks.md and its plot."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks import (
    copying,
    figures,
    guest_io,
    machine,
    noticing,
    page,
    passing,
    plot,
    pooling,
    publishing,
    restarting,
    staging,
)

BENCHMARKS: dict[str, Callable[[], Coroutine[Any, Any, figures.Result]]] = {
    publishing.NAME: publishing.measure,
    passing.NAME: passing.measure,
    noticing.NAME: noticing.measure,
    restarting.NAME: restarting.measure,
    staging.NAME: staging.measure,
    pooling.NAME: pooling.measure,
    copying.NAME: copying.measure,
    guest_io.NAME: guest_io.measure,
}

STORAGE = "storage"
GROUPS = {STORAGE: (staging.NAME, pooling.NAME, copying.NAME)}
"""Names for several: what the driver alone costs."""


def main() -> int:
    """Run the named benchmarks, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*BENCHMARKS, *GROUPS)))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    names = [each for name in arguments.names for each in GROUPS.get(name, (name,))]
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    logging.basicConfig(level=logging.ERROR)  # that a handler loses a killed proxy is no news here
    reports = [_run(name) for name in names or BENCHMARKS]
    if not names:
        text = page.render(machine.describe(), reports)
        (arguments.docs / "benchmarks.md").write_text(text)
        plot.draw(reports, arguments.docs / "benchmarks.svg")
    return 0


def _run(name: str) -> figures.Report:
    print(f"{name} …", file=sys.stderr, flush=True)
    report = asyncio.run(BENCHMARKS[name]()).report()
    print(page.section(report), flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
