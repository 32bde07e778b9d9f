"""Each code block of the authors' pages runs as it stands, where an author has the two wheels and a clone's examples.

The environment has the wheels and what they declare. The blocks run in a mount namespace whose /run and /var/lib are
empty. What cannot stand on a page is put in: the number of a process or of a loop device, a directory, and the steps
that a page leaves to its reader as `...`.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from crust.host.block import loop
from tests.support import capabilities, environments
from tests.support.pages.page_blocks import blocks
from tests.support.pages.page_programs import PAGES, program

pytestmark = pytest.mark.root
RUNTIME, DRIVER = "runtime-author.md", "driver-author.md"
MIB = 1 << 20

RUN = {
    (DRIVER, "def NodeExpandVolume"): "test_drivers_growth_leaves_the_filesystem_to_the_guest",
    (DRIVER, '"""A CSI driver in 100 lines'): "test_driver_of_the_page_is_ready_and_defers",
    (DRIVER, "mkdir -p /run/mini"): "test_driver_of_the_page_is_ready_and_defers",
    (RUNTIME, '"""A runtime in 80 lines'): "test_driver_of_the_page_is_ready_and_defers",
    (RUNTIME, "crust device-writers"): "test_device_of_a_reader_has_no_writer",
    (RUNTIME, "crust keeper"): "test_keeper_holds_what_the_command_names",
    (RUNTIME, '{"pids"'): "test_keeper_holds_what_the_command_names",
    (RUNTIME, "async with testing.serving"): "test_kit_of_the_page_tests_the_runtime",
    (RUNTIME, "crust-conformance --runtime 'python -m examples.box"): (
        "test_suite_prints_what_the_page_shows"
    ),
    (RUNTIME, "cd specs/proto"): "test_messages_in_go_are_built_as_the_page_says",
    (RUNTIME, "cd OUT"): "test_messages_in_go_are_built_as_the_page_says",
    (RUNTIME, "import crustv1"): "test_messages_in_go_are_built_as_the_page_says",
}
"""By page and first words: the test of this file that runs the block."""
NOT_RUN = {
    (RUNTIME, "crust-conformance --runtime 'python -m examples.kata"): (
        "it boots microVMs, which takes an image of a guest: tests/e2e/test_daemons_killed.py runs it"
    ),
}
"""Blocks that no test of this file runs, and why."""


def _block(page: str, begins: str) -> str:
    (found,) = [block for block in blocks(page) if block.startswith(begins)]
    return found


def test_each_block_is_run_or_has_a_reason() -> None:
    for page in PAGES:
        named = [words for of, words in (*RUN, *NOT_RUN) if of == page]
        for block in blocks(page):
            assert sum(block.startswith(words) for words in named) == 1, block.splitlines()[0]
        assert len(blocks(page)) == len(named)
    assert set(RUN.values()) <= set(globals())


class _Author(NamedTuple):
    """What an author has: a directory with the examples, and the environment's programs first on the PATH."""

    here: Path
    env: dict[str, str]

    def does(self, script: str, *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run it with sh in a mount namespace of its own, with empty /run and /var/lib; its processes end with it."""
        prepared = (
            "set -eu; mount --make-rprivate /; mount -t tmpfs none /run; mount -t tmpfs none /var/lib\n"
            "mkdir -p /var/lib/kubelet/plugins_registry; mount --bind /var/lib/kubelet /var/lib/kubelet\n"
            "mount --make-shared /var/lib/kubelet\n"
        )
        argv = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c")
        return subprocess.run(
            [*argv, prepared + script],
            cwd=self.here, env=self.env, capture_output=True, text=True, check=False, timeout=timeout_s,
        )  # fmt: skip


@pytest.fixture(scope="module")
def author() -> Iterator[_Author]:
    with tempfile.TemporaryDirectory(prefix="crust-") as directory:
        root = Path(directory)
        wheels = [
            environments.build_wheel(root / name, project)
            for name, project in (("crust", "."), ("suites", "conformance"))
        ]
        python = environments.make(root / "environment", *wheels)
        (root / "here").mkdir()
        shutil.copytree(environments.CHECKOUT / "examples", root / "here" / "examples")
        path = f"{python.parent}:{os.environ['PATH']}"
        yield _Author(root / "here", {"PATH": path, "HOME": str(root)})


_AWAIT = "until {}; do sleep 0.1; done\n"
"""The CLI has no event for it; the test's time ends the loop."""


def _served(block: str) -> str:
    """The lines of a block: what serves goes to the background."""
    serves = re.compile(r"^(python -m|crust shim|crust proxy)")
    return "".join(
        f"{line} &\n" if serves.match(line) else f"{line}\n" for line in block.splitlines()
    )


def test_driver_of_the_page_is_ready_and_defers(author: _Author) -> None:
    (author.here / "runtime.py").write_text(program(RUNTIME))
    registered = "crust handlers -o name | grep -q box"
    done = author.does(
        "mkdir -p /var/lib/kubelet/plugins/mini.csi.example /run/box/mnt\n"
        + _served(_block(DRIVER, "mkdir -p /run/mini"))
        + _AWAIT.format("crust drivers >/dev/null 2>&1")
        + "sleep inf | python runtime.py /run/crust/handlers.sock /run/box/box.sock /run/box/mnt &\n"
        + _AWAIT.format(registered)
        + "crust drivers\ncrust try --handler box --parameter crust.dev/defer=always\nls -A /var/lib/mini\n"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^mini\.csi\.example +ready", done.stdout, re.MULTILINE)
    assert "published /dev/loop" in done.stdout
    assert done.stdout.rstrip().endswith("DeleteVolume: OK")


def test_drivers_growth_leaves_the_filesystem_to_the_guest(author: _Author) -> None:
    method = _block(DRIVER, "def NodeExpandVolume")
    text = program(DRIVER).replace(
        "\n\ndef main(",
        f"\n\n{method}\n\n\nNode.NodeExpandVolume = NodeExpandVolume\n\n\ndef main(",
    )
    (author.here / "growing_driver.py").write_text(text)
    (author.here / "grow.py").write_text(_GROW)
    done = author.does("mkdir /run/pool; python grow.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["True", str(48 * MIB), "False"]


_GROW = """
import os, subprocess
import growing_driver as driver
from growing_driver import csi

def blocks():
    shown = subprocess.run(["dumpe2fs", "-h", device], capture_output=True, text=True).stdout
    return [line for line in shown.splitlines() if line.startswith("Block count:")]

images = driver.Images("/run/pool")
made = driver.Controller(images).CreateVolume(csi.CreateVolumeRequest(name="one"), None).volume
node = driver.Node(images)
node.NodeStageVolume(csi.NodeStageVolumeRequest(volume_id=made.volume_id), None)
device = images.device(made.volume_id)
before = blocks()
os.truncate(images.path(made.volume_id), 48 << 20)
try:
    request = csi.NodeExpandVolumeRequest(volume_id=made.volume_id, defer_fs_ops=True)
    answer = node.NodeExpandVolume(request, None)
    print(bool(before) and blocks() == before, driver.sh("blockdev", "--getsize64", device))
    assert answer.capacity_bytes == 48 << 20
    request.defer_fs_ops = False
    node.NodeExpandVolume(request, None)
    print(blocks() == before)
finally:
    node.NodeUnstageVolume(csi.NodeUnstageVolumeRequest(volume_id=made.volume_id), None)
"""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 16 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    attached = loop.attach(str(image))
    try:
        yield attached.path
    finally:
        loop.detach(attached)


def test_device_of_a_reader_has_no_writer(author: _Author, device: str) -> None:
    command = _block(RUNTIME, "crust device-writers").replace("/dev/loop7", device)
    # in the host's PID namespace, as the page says
    done = subprocess.run(
        ["sh", "-c", command], env=author.env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{device} has no writer\n"), done.stderr


def test_keeper_holds_what_the_command_names(author: _Author) -> None:
    command = _block(RUNTIME, "crust keeper").replace("4711", "$!")
    done = author.does(
        "mkdir -m 700 /run/mine; sleep inf & exec 7>/run/mine/claim.lock 8</dev/null\n" + command
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown, printed = json.loads(_block(RUNTIME, '{"pids"')), json.loads(done.stdout)
    assert printed.keys() == shown.keys()
    assert len(printed["pids"]) == len(shown["pids"])
    assert printed["held"] == shown["held"]


def test_kit_of_the_page_tests_the_runtime(author: _Author, device: str) -> None:
    (author.here / "runtime.py").write_text(program(RUNTIME))
    steps = iter(
        ("await begin(proxy)", 'await say("start box-1 /pods/a/mount")', 'await say("stop box-1")')
    )
    block = _block(RUNTIME, "async with testing.serving").replace("/dev/loop7", device)
    body = re.sub(r"(?<=^    )\.\.\.", lambda _: next(steps), block, flags=re.MULTILINE)
    assert next(steps, None) is None, "each `...` of the page is a step"
    inside = "".join(f"    {line}\n" for line in body.splitlines())
    (author.here / "kit.py").write_text(_KIT.replace("    BLOCK\n", inside))
    done = author.does("python kit.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["ok", "ok"]


_KIT = """
import asyncio, os, sys, tempfile
from asyncio.subprocess import PIPE, create_subprocess_exec
from crust_conformance.runtimes import testing

async def begin(proxy):
    global box
    os.mkdir("/run/mnt")
    argv = (sys.executable, "runtime.py", proxy.socket, "/run/box.sock", "/run/mnt")
    box = await create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)

async def say(line):
    box.stdin.write(f"{line}\\n".encode())
    print((await box.stdout.readline()).decode().strip())

async def main():
    directory = tempfile.mkdtemp()
    BLOCK
    box.kill()
    await box.wait()

asyncio.run(main())
"""


def test_suite_prints_what_the_page_shows(author: _Author) -> None:
    command, _, *shown = _block(
        RUNTIME, "crust-conformance --runtime 'python -m examples.box"
    ).splitlines()
    *lines, dots = shown
    assert dots == "…"
    only = ",".join(line.split()[0] for line in lines)
    done = author.does(f"{command} --only {only}")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    assert [line for line in lines if line not in printed] == []


def test_messages_in_go_are_built_as_the_page_says(author: _Author) -> None:
    capabilities.need("go-driver")
    made, out = environments.CHECKOUT / ".cache" / "go", author.here / "module"
    out.mkdir()
    for name in ("go.mod", "go.sum"):  # with the versions that the messages need
        shutil.copy(environments.CHECKOUT / "examples" / "go" / name, out)
    line, _, *body = _block(RUNTIME, "import crustv1").splitlines()
    statements = "\n".join(f"\t{statement.strip()}" for statement in body)
    (out / "main.go").write_text(
        f'package main\n\n{line}\nimport "google.golang.org/grpc"\n\n'
        f"func main() {{\n\tvar connection *grpc.ClientConn\n{statements}\n\t_ = client\n}}\n"
    )
    go = subprocess.run(
        [environments.CHECKOUT / "tests" / "find_go.sh", made],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # grpc_tools is of the environment that runs the tests
    tools = f"{environments.CHECKOUT}/.venv/bin:{made}:{Path(go).parent}"
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "GOTOOLCHAIN": "local"}
    for begins in ("cd specs/proto", "cd OUT"):
        script = "set -e\n" + re.sub(r"\bOUT\b", str(out), _block(RUNTIME, begins))
        done = subprocess.run(
            ["sh", "-c", script], cwd=environments.CHECKOUT, env=env,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
