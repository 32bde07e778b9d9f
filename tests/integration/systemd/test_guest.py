"""A volume in a guest, by the commands of docs/install.md, on a node that a real systemd has booted."""

import contextlib
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.systemd.test_installed import PAGE, follow
from tests.support import booted_systemd, capabilities
from tests.support.booted_systemd import CHECKOUT, Machine

pytestmark = pytest.mark.vm

SLOW_S = 300.0


def blocks() -> list[list[str]]:
    """The blocks of commands of the page's part about a guest."""
    part = PAGE.partition("\n## A volume in a guest\n")[2].partition("\n#")[0]
    return [
        [line.strip() for line in block.splitlines()]
        for block in re.findall(r"(?:^    .+\n)+", part, re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """With crust installed as the page says."""
    capabilities.need("mount", "loop", "vm", "systemd")
    with booted_systemd.machine() as booted:
        follow(booted, "As units of systemd")
        yield booted


@contextlib.contextmanager
def runtime(machine: Machine, setup: str, start: str, show: str) -> Iterator[None]:
    """The page's first block: the example runtime as a unit, until crust shows its handler."""
    _in_checkout(machine, setup)
    _in_checkout(machine, start)
    try:
        with machine.running(*show.split(), "--watch") as shown:
            _until(shown, "kata ")
        yield
    finally:
        machine.output("systemctl", "stop", "example-runtime")


def test_volume_is_mounted_in_guest_by_commands_of_page(machine: Machine) -> None:
    first, (publish,), (run,) = blocks()
    with runtime(machine, *first):
        with machine.running("sh", "-c", publish) as trying:
            lines = _until(trying, "waiting for a sandbox with the mount source ")
            source = lines[-1].rpartition(" ")[2]
            device = next(line.split()[1] for line in lines if line.startswith("published /dev/"))
            shown = _in_checkout(machine, run.replace("SOURCE", source))
            assert machine.run("findmnt", "--source", device).returncode == 1  # not on the host
            lines += trying.communicate(timeout=SLOW_S)[0].splitlines()
            assert trying.returncode == 0, lines
        assert "written" in shown.splitlines()
        assert any(line.endswith(" /data") for line in shown.splitlines()), shown
        assert [line.split()[0] for line in lines if " sandbox run-" in line] == [
            "claimed", "mounted", "released",
        ]  # fmt: skip
        assert lines[-1] == "DeleteVolume: OK"
        assert machine.run("findmnt", source).returncode == 1


def _in_checkout(machine: Machine, line: str) -> str:
    return machine.output("sh", "-c", f"cd {CHECKOUT} && {line}", timeout_s=SLOW_S)


def _until(process: "subprocess.Popen[str]", wanted: str) -> list[str]:
    """What the process prints, up to the line that begins so."""
    lines: list[str] = []
    assert process.stdout is not None
    while not (lines and lines[-1].startswith(wanted)):
        line = process.stdout.readline()
        assert line, lines
        lines.append(line.rstrip("\n"))
    return lines
