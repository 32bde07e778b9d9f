"""`python -m examples.cluster`: the demo of many nodes; exit code 0 if all checks succeed.

The network is made first; everything else runs in the network of the services, as a second process.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.cluster import ceph_cluster, network
from examples.cluster.board import Board
from examples.cluster.machine import Machine
from examples.cluster.programs import Programs
from examples.cluster.scenario import Scenario
from examples.cluster.services import Services
from examples.kata.demo import orphans
from examples.kata.demo.report import Report, require

NODES = ("a", "b", "c")


def main(arguments: list[str]) -> int:
    """Make the network and run the demo in it; with the network's directory, run the demo."""
    if os.geteuid() != 0:
        sys.stderr.write("the demo makes network namespaces, attaches and mounts: run it as root\n")
        return 2
    if arguments:
        return asyncio.run(_demo(network.Network.of(arguments[0], NODES)))
    with network.running(*NODES) as hosts:
        directory = os.path.dirname(hosts.services.namespace)
        inner = (sys.executable, "-m", "examples.cluster", directory)
        with subprocess.Popen(hosts.services.command(*inner)) as demo:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda got, _frame: demo.send_signal(got))
            return demo.wait()


async def _demo(hosts: network.Network) -> int:
    """Run the scenario, stop everything in any case, and check for orphans."""
    board = Board()
    report = Report(running=board.step)
    base = Path(tempfile.mkdtemp(prefix="crust-cluster-"))
    before = orphans.find(base)
    report.console.rule(Scenario.title)
    try:
        with board.shown(report.console):
            await _run(hosts, base, report, board)
    finally:
        with contextlib.suppress(Exception), report.step("check that no orphans remain") as step:
            left = orphans.find(base).since(before)
            require(f"no orphans remain: {', '.join(left)}", not left)
            await asyncio.to_thread(shutil.rmtree, base)
            step.found("no loop device, no mount, no process, no directory")
    report.table(Scenario.title)
    return 0 if all(step.ok for step in report.steps) else 1


async def _run(hosts: network.Network, base: Path, report: Report, board: Board) -> None:
    address = hosts.services.address
    with contextlib.ExitStack() as stack:
        with report.step("start a Ceph cluster"):
            ceph = stack.enter_context(
                ceph_cluster.running(base / "ceph", host=address, with_mgr=True)
            )
        services = Services(ceph, Programs(hosts.services, base / "services"))
        machines = tuple(Machine(host, base, services) for host in hosts.nodes)
        scenario = Scenario(hosts, services, machines, report, board)
        # one that fails leaves none of the others running
        async with contextlib.AsyncExitStack() as ends:
            ends.push_async_callback(services.programs.stop_all)
            for machine in reversed(machines):
                ends.push_async_callback(machine.close)
                ends.push_async_callback(hosts.join, machine.host)
            await _told(scenario, services, machines, report)


async def _told(
    scenario: Scenario, services: Services, machines: tuple[Machine, ...], report: Report
) -> None:
    """Ctrl-C and SIGTERM end it early; a failure is printed with the logs of all processes."""
    running = asyncio.ensure_future(scenario.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        report.console.print("[red]the demo was interrupted:[/] cleaning up")
    except Exception as error:  # a person wants the logs after any error
        report.console.print_exception(max_frames=4)
        for programs in (services.programs, *(machine.programs for machine in machines)):
            for name in programs.names():
                report.console.rule(f"{programs.host.name}: {name}.log")
                report.console.print(programs.log_tail(name), markup=False)
        report.console.print(f"[red]the demo failed:[/] {error}")
    await scenario.clean_up()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
