"""The logs of a sandbox, as its client gets them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from crust.core import volumes
from examples.kata.runtime import control
from examples.kata.runtime.client import Client, RuntimeRefused
from examples.kata.runtime.sandboxes import Sandboxes
from tests.support.fake_vms.guest import FakeConsole
from tests.support.fake_vms.handoff import FakeHandoff
from tests.support.fake_vms.vms import FakeVms
from tests.support.fake_vms.world import World


@pytest.fixture
async def sandboxes(tmp_path: Path) -> AsyncIterator[Sandboxes]:
    world = World(records={})
    sandboxes = Sandboxes(tmp_path / "sandboxes", FakeVms(world), FakeHandoff(world))
    async with control.serving(tmp_path / "control.sock", control.Control(sandboxes)):
        yield sandboxes
    await sandboxes.close()


async def test_logs_of_a_sandbox_are_what_its_console_kept(
    sandboxes: Sandboxes, tmp_path: Path
) -> None:
    await sandboxes.get(volumes.SandboxId("one"))
    seen: list[bytes] = []
    await Client(str(tmp_path / "control.sock")).logs("one", seen.append, follow=False)
    assert seen == [b"booted\n"]


async def test_followed_logs_go_on_until_the_console_ends(
    sandboxes: Sandboxes, tmp_path: Path
) -> None:
    sandbox = await sandboxes.get(volumes.SandboxId("one"))
    printed = sandbox.vm.console
    assert isinstance(printed, FakeConsole)
    for piece in (b"more\n", None):
        printed.printed.put_nowait(piece)
    seen: list[bytes] = []
    async with asyncio.timeout(60):
        await Client(str(tmp_path / "control.sock")).logs("one", seen.append, follow=True)
    assert b"".join(seen) == b"booted\nmore\n"


async def test_logs_of_an_unknown_sandbox_are_refused(sandboxes: Sandboxes, tmp_path: Path) -> None:
    with pytest.raises(RuntimeRefused, match="there is no sandbox two"):
        await Client(str(tmp_path / "control.sock")).logs("two", print, follow=False)
