"""`python -m examples.kata.demo`: run the story; exit code 0 if all of it is so."""

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
    """Tell the story, tidy up whatever happened, and look at what is left."""
    if os.geteuid() != 0:
        sys.stderr.write("the demo attaches loop devices and mounts: run it as root\n")
        return 2
    report = Report()
    base = Path(tempfile.mkdtemp(prefix="crust-demo-"))
    before = orphans.look(base)
    node = Node(base)
    story = Scenario(node, report)
    try:
        await _tell(story, node, report)
    finally:
        await story.give_up()
        await story.close()
        await node.stop_all()
        await _check_nothing_left(report, base, before)
    report.table()
    return 0 if all(step.ok for step in report.steps) else 1


async def _tell(story: Scenario, node: Node, report: Report) -> None:
    """Tell the story; Ctrl-C and SIGTERM end it early, and so does a failure, which is explained."""
    telling = asyncio.ensure_future(story.tell())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, telling.cancel)
    try:
        await telling
    except asyncio.CancelledError:
        report.console.print("[red]the demo was interrupted:[/] tidying up")
    except Exception as error:
        report.console.print_exception(max_frames=4)
        for name in ("driver", "shim", "proxy", "runtime"):
            report.console.rule(f"{name}.log")
            report.console.print(node.log_tail(name), markup=False)
        report.console.print(f"[red]the demo failed:[/] {error}")


async def _check_nothing_left(report: Report, base: Path, before: orphans.Traces) -> None:
    with contextlib.suppress(Exception), report.step("nothing is left behind") as step:
        left = orphans.look(base).since(before)
        require(f"nothing is left: {', '.join(left)}", not left)
        await asyncio.to_thread(shutil.rmtree, base)
        step.found("no loop device, no mount, no process, no directory")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
