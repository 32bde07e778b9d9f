"""`python -m examples.kata.demo`: run the scenario; exit code 0 if all checks succeed."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from examples.kata.demo import orphans
from examples.kata.demo.node import Node
from examples.kata.demo.report import Report, require
from examples.kata.demo.scenario import Scenario


async def main() -> int:
    """Run the scenario, clean up in any case, and check for orphans."""
    if os.geteuid() != 0:
        sys.stderr.write("the demo attaches loop devices and mounts: run it as root\n")
        return 2
    report = Report()
    base = Path(tempfile.mkdtemp(prefix="crust-demo-"))
    before = orphans.find(base)
    node = Node(base)
    scenario = Scenario(node, report)
    try:
        await _run(scenario, node, report)
    finally:
        await scenario.clean_up()
        await scenario.close()
        await node.stop_all()
        await _check_no_orphans(report, base, before)
    report.table()
    return 0 if all(step.ok for step in report.steps) else 1


async def _run(scenario: Scenario, node: Node, report: Report) -> None:
    """Run the scenario; Ctrl-C and SIGTERM end it early; a failure is printed with the daemons' logs."""
    running = asyncio.ensure_future(scenario.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        report.console.print("[red]the demo was interrupted:[/] cleaning up")
    except Exception as error:  # whatever it is, a person wants the daemons' logs
        report.console.print_exception(max_frames=4)
        for name in ("driver", "shim", "proxy", "runtime"):
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
