"""runtime-cli (H-35): a program answers for a runtime; what others could have named or written is not run."""

import asyncio
import json
import os
import select
from collections.abc import Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from crust import errors, volumes
from crust.handoff import layout
from crust.host.files import durable
from crust.proxy.runtimes import runtime_cli
from crust.proxy.runtimes.runtime_cli import (
    RuntimeCli,
    RuntimeCliBusy,
    RuntimeCliFailed,
    UntrustedRuntimeCli,
)
from crust.wire.v1 import runtime_pb2, runtime_pb2_grpc
from tests.support.nodes import node as nodes
from tests.support.nodes.node import NAMED, Node, Places

TARGET = volumes.TargetPath("/var/lib/kubelet/pods/1/mount")
STATS = {"usage": [{"unit": "BYTES", "total": "1000", "used": "300", "available": "700"}]}
pytestmark = pytest.mark.spec("H-35")


class Entry:
    """An entry with a `runtime-cli`, and the program that it names."""

    def __init__(self, root: Path) -> None:
        self.layout = layout.Layout(f"{root}/volumes")
        self.file = Path(self.layout.runtime_cli_path(TARGET))
        self.file.parent.mkdir(parents=True, mode=0o700)
        self.bin = root / "bin"
        self.bin.mkdir(mode=0o755)
        self.program = self.bin / "cli"
        self.cli = RuntimeCli(self.layout)
        self.write("exit 1")
        self.name(str(self.program))

    def write(self, script: str) -> None:
        self.program.write_text(f"#!/bin/sh\n{script}\n")
        self.program.chmod(0o755)

    def name(self, path: str) -> None:
        self.file.write_text(f"{path}\n")
        self.file.chmod(0o600)


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return Entry(tmp_path)


async def test_stats_and_resize_are_asked_of_the_program_with_the_arguments_of_the_kep(
    entry: Entry, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    resized = '"{\\"capacity_bytes\\": $4}"'
    entry.write(
        f'echo "$@" >> {asked}; env | cut -d= -f1 >> {asked}\n'
        f"case $2 in stats) echo '{json.dumps(STATS)}';; resize) echo {resized};; esac"
    )
    stats = await entry.cli.stats(TARGET, None)
    assert stats is not None
    assert stats.usage == (volumes.VolumeUsage(volumes.UsageUnit.BYTES, 1000, 300, 700),)
    assert await entry.cli.resize(TARGET, volumes.CapacityRange(500, 900)) == 500
    lines = asked.read_text().splitlines()
    assert lines[0] == f"crust stats {TARGET}"
    assert f"crust resize {TARGET} 500 900" in lines
    assert set(lines[1:]) <= {
        "LC_ALL",
        "PATH",
        "PWD",
        "SHLVL",
        "_",
        f"crust resize {TARGET} 500 900",
    }


async def test_an_entry_without_the_file_has_no_program(entry: Entry) -> None:
    entry.file.unlink()
    assert await entry.cli.stats(TARGET, None) is None
    assert await entry.cli.resize(TARGET, volumes.CapacityRange(1, 0)) is None


def _is_a_link(entry: Entry) -> None:
    (entry.bin / "link").symlink_to(entry.program)
    entry.name(f"{entry.bin}/link")


def _is_below_a_link(entry: Entry) -> None:
    (entry.bin.parent / "bin2").symlink_to(entry.bin)
    entry.name(f"{entry.bin.parent}/bin2/cli")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda entry: entry.name("cli"), id="relative"),
        pytest.param(lambda entry: entry.name(""), id="empty"),
        pytest.param(lambda entry: entry.name(f"{entry.bin}/../bin/cli"), id="not normal"),
        pytest.param(lambda entry: entry.name(f"{entry.program}\n{entry.program}"), id="two lines"),
        pytest.param(lambda entry: entry.file.write_bytes(b"/\xff"), id="not text"),
        pytest.param(lambda entry: entry.name(f"{entry.program} --flag"), id="arguments"),
        pytest.param(lambda entry: entry.name(f"{entry.bin}"), id="a directory"),
        pytest.param(lambda entry: entry.program.chmod(0o775), id="program of a group"),
        pytest.param(lambda entry: entry.program.chmod(0o757), id="program of others"),
        pytest.param(lambda entry: entry.program.chmod(0o644), id="not executable"),
        pytest.param(lambda entry: entry.bin.chmod(0o777), id="directory of others"),
        pytest.param(_is_a_link, id="a link"),
        pytest.param(_is_below_a_link, id="below a link"),
        pytest.param(lambda entry: entry.file.chmod(0o666), id="file of others"),
        pytest.param(lambda entry: entry.file.write_bytes(b"/" * 5000), id="too long"),
    ],
)
async def test_a_program_that_others_could_have_named_or_written_is_not_run(
    entry: Entry, tmp_path: Path, spoil: Callable[[Entry], None]
) -> None:
    ran = tmp_path / "ran"
    entry.write(f"touch {ran}")
    spoil(entry)
    wanted = (
        UntrustedRuntimeCli, durable.UntrustedFile, durable.UnreadableFile, errors.NotFound
    )  # fmt: skip
    with pytest.raises(wanted):
        await entry.cli.stats(TARGET, None)
    assert not ran.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("part", ["program", "bin", "file"])
async def test_a_program_of_another_user_is_not_run(entry: Entry, part: str) -> None:
    os.chown(getattr(entry, part), 1234, 1234)
    with pytest.raises((UntrustedRuntimeCli, durable.UntrustedFile)):
        await entry.cli.stats(TARGET, None)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no json", "no RuntimeGetVolumeStatsResponse"),
        ("head -c 60000 /dev/zero | tr '\\0' '['", "no RuntimeGetVolumeStatsResponse"),
        ("echo '[]'", "no RuntimeGetVolumeStatsResponse"),
        ("echo '{\"usage\": 3}'", "no RuntimeGetVolumeStatsResponse"),
        (r"printf '\377'", "no RuntimeGetVolumeStatsResponse"),
        ("echo broken >&2; exit 3", "exited with 3: broken"),
        ("head -c 100000 /dev/zero", "wrote more than 65536 bytes"),
        ("kill -9 $$", "killed by signal 9"),
    ],
)
async def test_bad_output_is_an_error_of_its_own(entry: Entry, script: str, why: str) -> None:
    entry.write(script)
    with pytest.raises(RuntimeCliFailed, match=why):
        await entry.cli.stats(TARGET, None)


async def test_impossible_numbers_are_not_believed(entry: Entry) -> None:
    entry.write('echo \'{"usage": [{"unit": "BYTES", "total": "1", "used": "2"}]}\'')
    with pytest.raises(errors.RuntimeFailed, match="impossible"):
        await entry.cli.stats(TARGET, None)


async def test_a_program_that_hangs_is_killed_with_its_children_and_runs_once_at_a_time(
    entry: Entry, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    entry.write(f"sleep 1000 & echo $! > {started}; wait")
    first = asyncio.create_task(entry.cli.stats(TARGET, None))
    child = int(await asyncio.to_thread(started.read_text))
    with pytest.raises(RuntimeCliBusy):
        await entry.cli.stats(TARGET, None)
    ended = os.pidfd_open(child)
    first.cancel()
    await asyncio.wait([first])
    readable, _, _ = await asyncio.to_thread(select.select, [ended], [], [], 20)
    os.close(ended)
    assert readable, "the program's child lives on"


async def test_a_program_is_killed_at_the_deadline(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_cli, "STATS_TIMEOUT_S", 0.05)
    entry.write("exec sleep 1000")
    with pytest.raises(RuntimeCliFailed, match="did not end within"):
        await entry.cli.stats(TARGET, None)


async def test_a_volume_whose_handler_went_away_is_asked_of_the_program_and_bounded(
    places: Places, tmp_path: Path
) -> None:
    target = places.target("one")
    async with nodes.running(places) as node:
        async with node.handler():
            await node.co.publish("vol-1", target, volume_context=NAMED)
        with node.sandbox(target):
            with pytest.raises(grpc.aio.AioRpcError, match="not registered now"):
                await node.co.stats("vol-1", target)
            program = _program_of(places, target, tmp_path)
            _answer(program, STATS)
            assert (await node.co.stats("vol-1", target)).usage[0].used == 300
            _answer(program, {"usage": [{"unit": "BYTES", "total": str(1 << 50)}]})
            with pytest.raises(grpc.aio.AioRpcError, match="impossible"):
                await node.co.stats("vol-1", target)
            size_bytes = node.devices.default_bytes
            _answer(program, {"capacity_bytes": str(size_bytes)})
            assert await _expand(node, target) == size_bytes
            _answer(program, {"capacity_bytes": str(size_bytes + 1)})
            with pytest.raises(grpc.aio.AioRpcError, match="impossible size"):
                await _expand(node, target)
        await node.co.unpublish("vol-1", target)
        assert places.entries() == []


async def test_a_handler_that_offers_neither_is_asked_by_its_program(
    places: Places, tmp_path: Path
) -> None:
    target = places.target("one")
    async with nodes.running(places) as node, node.handler(features=frozenset()):
        await node.co.publish("vol-1", target, volume_context=NAMED)
        with node.sandbox(target):
            with pytest.raises(grpc.aio.AioRpcError, match="does not offer STATS"):
                await node.co.stats("vol-1", target)
            program = _program_of(places, target, tmp_path)
            _answer(program, STATS)
            assert (await node.co.stats("vol-1", target)).usage[0].used == 300


def _program_of(places: Places, target: str, directory: Path) -> Path:
    """The program that the runtime has named beside the entry."""
    program = directory / "cli"
    named = Path(layout.Layout(places.volumes).entry(volumes.TargetPath(target)).runtime_cli)
    named.write_text(str(program))
    named.chmod(0o600)
    return program


def _answer(program: Path, answer: object) -> None:
    program.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    program.chmod(0o700)


async def _expand(node: Node, target: str) -> int:
    stub = runtime_pb2_grpc.RuntimeStub(node.proxy_channels["runtime"])
    answer = await stub.RuntimeExpandVolume(
        runtime_pb2.RuntimeExpandVolumeRequest(volume_target_path=target), timeout=20
    )
    size_bytes: int = answer.capacity_bytes
    return size_bytes
