"""The runtime's answers to freeze, thaw and limits; VMs are fakes in which changes wait for a thaw."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import volumes
from examples.kata.runtime import handler, messages
from examples.kata.runtime.sandboxes import Sandboxes
from examples.kata.vm import faults
from tests.support.drivers.fake_driver import Gate
from tests.support.fake_vms.handoff import FakeHandoff
from tests.support.fake_vms.vms import FakeVms
from tests.support.fake_vms.world import RunningVm, World
from tests.support.faults.refusals import until
from tests.support.records.records import TARGET, a_record

ONE = volumes.SandboxId("one")
OLD, NEW = volumes.IoLimits(read_iops=10), volumes.IoLimits(write_iops=20)
RUN = messages.Run(
    sandbox="one",
    argv=("true",),
    mounts=(messages.Mount(source=TARGET.text, destination="/data"),),
    keep=True,
)


@pytest.fixture
def world() -> World:
    mount = replace(a_record().mount, io_limits=OLD)
    return World(records={TARGET.text: a_record().replaced(mount)})


@pytest.fixture
def sandboxes(tmp_path: Path, world: World) -> Sandboxes:
    return Sandboxes(tmp_path / "sandboxes", FakeVms(world), FakeHandoff(world))


def body(world: World) -> RunningVm:
    (vm,) = world.bodies.values()
    return vm


async def test_freeze_lasts_until_thaw_and_second_thaw_returns_false(
    world: World, sandboxes: Sandboxes
) -> None:
    answers = handler.Volumes(sandboxes)
    await (await sandboxes.get(ONE)).start(RUN)
    await answers.freeze(TARGET, 10)
    assert len(body(world).frozen) == 1
    assert await answers.thaw(TARGET) is True
    assert await answers.thaw(TARGET) is False


async def test_expand_waits_for_thaw_and_does_not_block_it(
    world: World, sandboxes: Sandboxes
) -> None:
    await (await sandboxes.get(ONE)).start(RUN)
    vm = sandboxes.all()[0].vm
    serial = sandboxes.all()[0].held[0].serial
    answers = handler.Volumes(sandboxes)
    await answers.freeze(TARGET, 10)
    gate = world.gates["grow"] = Gate()
    growing = asyncio.create_task(vm.guest.grow(serial, 1))
    await until(gate.entered)
    gate.opened.set()
    assert await answers.thaw(TARGET) is True
    async with asyncio.timeout(60):
        await growing


async def test_freeze_thaw_and_limits_without_sandbox_are_refused(sandboxes: Sandboxes) -> None:
    answers = handler.Volumes(sandboxes)
    for asked in (
        answers.freeze(TARGET, 10),
        answers.thaw(TARGET),
        answers.set_limits(TARGET, NEW),
    ):
        with pytest.raises(handler.VolumeNotInSandbox):
            await asked


@pytest.mark.parametrize("step", ["hold", "attach", "limit", "mount", "grow"])
async def test_limits_set_during_mount_override_those_of_the_record(
    world: World, sandboxes: Sandboxes, step: str
) -> None:
    answers = handler.Volumes(sandboxes)
    one = await sandboxes.get(ONE)
    gate = world.gates[step] = Gate()
    starting = asyncio.create_task(one.start(RUN))
    await until(gate.entered)
    setting = asyncio.create_task(answers.set_limits(TARGET, NEW))
    done, _ = await asyncio.wait((setting, starting), timeout=0)
    assert not done
    gate.opened.set()
    async with asyncio.timeout(60):
        await asyncio.gather(setting, starting)
    assert list(body(world).limits.values()) == [NEW]


async def test_limits_of_a_volume_whose_start_fails_are_refused(
    world: World, sandboxes: Sandboxes
) -> None:
    answers = handler.Volumes(sandboxes)
    one = await sandboxes.get(ONE)
    gate = world.gates["mount"] = Gate()
    world.failures["mount"].append(faults.GuestFilesystemCorrupt("a damaged journal"))
    starting = asyncio.create_task(one.start(RUN))
    await until(gate.entered)
    setting = asyncio.create_task(answers.set_limits(TARGET, NEW))
    gate.opened.set()
    ended = await asyncio.gather(starting, setting, return_exceptions=True)
    assert [type(result) for result in ended] == [
        faults.GuestFilesystemCorrupt,
        handler.VolumeNotInSandbox,
    ]


async def test_limits_refused_by_qemu_are_reported(world: World, sandboxes: Sandboxes) -> None:
    answers = handler.Volumes(sandboxes)
    await (await sandboxes.get(ONE)).start(RUN)
    world.failures["limit"].append(faults.QemuCommandFailed("block_set_io_throttle", "too large"))
    with pytest.raises(faults.QemuCommandFailed):
        await answers.set_limits(TARGET, NEW)
    assert list(body(world).limits.values()) == [OLD]
