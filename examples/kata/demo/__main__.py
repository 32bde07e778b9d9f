"""`python -m examples.kata.demo`: run both scenarios; exit code 0 if all checks succeed."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from examples.kata.demo import orphans
from examples.kata.demo.node import Node, Vendor
from examples.kata.demo.report import Report, require
from examples.kata.demo.scenario import Scenario
from examples.kata.demo.wrapped_scenario import VENDOR, WrappedScenario


class DemoScenario(Protocol):
    """A scenario on a node of its own."""

    title: str

    async def run(self) -> None:
        """Run all steps."""

    async def clean_up(self) -> None:
        """Undo the steps of a scenario that ended early."""

    async def close(self) -> None:
        """Close the channels."""


async def main() -> int:
    """Run the scenarios one after the other; the first that fails is the last."""
    if os.geteuid() != 0:
        sys.stderr.write("the demo attaches loop devices and mounts: run it as root\n")
        return 2
    for kind, vendor in ((Scenario, None), (WrappedScenario, VENDOR)):
        if not await _tell(kind, vendor):
            return 1
    return 0


async def _tell(kind: type[Scenario] | type[WrappedScenario], vendor: Vendor | None) -> bool:
    """Run a scenario, clean up in any case, and check for orphans; returns whether all checks succeeded."""
    report = Report()
    base = Path(tempfile.mkdtemp(prefix="crust-demo-"))
    before = orphans.find(base)
    node = Node(base, vendor)
    story = kind(node, report)
    report.console.rule(story.title)
    try:
        await _run(story, node, report)
    finally:
        await story.clean_up()
        await story.close()
        await node.stop_all()
        await _check_no_orphans(report, base, before)
    report.table(story.title)
    return all(step.ok for step in report.steps)


async def _run(story: DemoScenario, node: Node, report: Report) -> None:
    """Run the scenario; Ctrl-C and SIGTERM end it early; a failure is printed with the daemons' logs."""
    running = asyncio.ensure_future(story.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        report.console.print("[red]the demo was interrupted:[/] cleaning up")
    except Exception as error:  # a person wants the daemons' logs after any error
        report.console.print_exception(max_frames=4)
        for name in ("driver", "controller", "shim", "proxy", "runtime"):
            report.console.rule(f"{name}.log")
            report.console.print(node.log_tail(name), markup=False)
        report.console.print(f"[red]the demo failed:[/] {error}")


async def _check_no_orphans(report: Report, base: Path, before: orphans.Resources) -> None:
    with contextlib.suppress(Exception), report.step("check that no orphans remain") as step:
        left = orphans.find(base).since(before)
        require(f"no orphans remain: {', '.join(left)}", not left)
        await asyncio.to_thread(shutil.rmtree, base)
        step.found("no loop device, no mount, no process, no directory")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
