"""`crust gc`: which publishes count as forgotten, what each check needs, and what is done then."""

import errno
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from crust.cli.gc import collect
from crust.cli.gc.kernel import Kernel, Users
from crust.core import errors
from crust.host.block.holders import DeviceInUse, Holder
from tests.support.drivers.fake_driver import FakeDriver
from tests.support.faults import lies
from tests.support.nodes.fake_node import DRIVER, FakeNode
from tests.support.nodes.places import Places

PV, POD, VOLUME, DEVICE, LOOP = "pv-1", "0a1b-2c", "vol-1", "/dev/loop7", "/dev/loop8"
BASE = "plugins/kubernetes.io/csi/volumeDevices"


@dataclass
class FakeKernel(Kernel):
    """A host on which the kubelet's loop device is upon the device, and nobody else."""

    hidden: str = ""
    users: dict[str, Users] = field(
        default_factory=lambda: {DEVICE: Users((LOOP,), ()), LOOP: Users((), ())}
    )
    bound: list[str] = field(default_factory=list)
    processes: tuple[str, ...] = ()
    mounted: set[str] = field(default_factory=set)
    loops: dict[str, str] = field(default_factory=dict)
    refuses: bool = False
    fails: OSError | None = None
    other_devices: dict[str, str] = field(default_factory=dict)
    on_unmount: Callable[[], None] = lambda: None

    def not_visible(self) -> str:
        return self.hidden

    def device_at(self, path: str) -> str:
        return self.other_devices.get(path, DEVICE) if path in self.mounted else ""

    def users_of(self, device: str) -> Users:
        users = self.users.get(device, Users((), ()))
        return replace(users, binds=(*self.mounted, *self.bound))

    def loops_of(self, path: str) -> tuple[str, ...]:
        return (self.loops[path],) if path in self.loops else ()

    def processes_of(self, pod_uid: str) -> tuple[str, ...]:
        if self.fails:
            raise self.fails
        return self.processes

    def detach(self, device: str, path: str) -> None:
        if self.refuses:
            raise DeviceInUse(device, holders=(Holder(7, "dd", "fd 3"),))
        assert self.loops.pop(path) == device

    def unmount(self, path: str) -> None:
        assert path not in self.loops, "a loop device keeps the bind busy"
        self.mounted.discard(path)
        self.on_unmount()


@dataclass
class Forgotten:
    """A node whose kubelet removed a pod's directory and never unpublished its raw volume."""

    node: FakeNode
    kernel: FakeKernel
    root: str
    target: str
    mapped: str
    staging: str
    data: Path

    async def gc(self, *, dry_run: bool = False) -> tuple[collect.Result, ...]:
        options = collect.Options(self.node.places.run, self.root, 600, dry_run)
        return await collect.collect(options, self.kernel)

    def called(self) -> list[str]:
        wanted = ("NodeUnpublishVolume", "NodeUnstageVolume")
        return [call.method for call in self.node.driver.calls if call.method in wanted]

    async def kept_for(self, name: str) -> str:
        """Check that nothing is touched because one check failed; returns what it says."""
        (result,) = await self.gc()
        missing = [check for check in result.checks if not check.proven]
        assert [check.name for check in missing] == [name]
        assert (result.outcome, self.called(), self.kernel.loops) == (
            "kept",
            [],
            {self.mapped: LOOP},
        )
        return missing[0].text


def old(*paths: str | Path) -> None:
    for path in paths:
        os.utime(path, (1_000_000_000, 1_000_000_000))


@pytest_asyncio.fixture
async def forgotten(places: Places) -> AsyncIterator[Forgotten]:
    base = f"{places.kubelet}/{BASE}"
    target, mapped = f"{base}/publish/{PV}/{POD}", f"{base}/{PV}/dev/{POD}"
    data = Path(f"{base}/{PV}/data/vol_data.json")
    for path in (target, mapped, str(data)):
        os.makedirs(os.path.dirname(path))
        Path(path).touch()
    os.makedirs(f"{places.kubelet}/pods")
    data.write_text(json.dumps({"driverName": DRIVER, "volumeHandle": VOLUME}))
    old(os.path.dirname(target), os.path.dirname(mapped), data)
    kernel = FakeKernel(mounted={target, mapped}, loops={mapped: LOOP})
    async with FakeNode(places, driver=FakeDriver()) as node, node.handler():
        yield Forgotten(
            node, kernel, places.kubelet, target, mapped, f"{base}/staging/{PV}", data
        )  # fmt: skip


async def test_dry_run_says_the_proof_and_changes_nothing(forgotten: Forgotten) -> None:
    (result,) = await forgotten.gc(dry_run=True)
    assert result.outcome == "proven"
    assert [check.proven for check in result.checks] == [True] * len(result.checks)
    assert result.steps == (
        f"detach the kubelet's loop device {LOOP}",
        f"unmount the kubelet's bind {forgotten.mapped}",
        f"NodeUnpublishVolume {VOLUME} {forgotten.target}",
        f"NodeUnstageVolume {VOLUME} {forgotten.staging}",
    )
    assert forgotten.called() == []
    assert forgotten.kernel.mounted == {forgotten.target, forgotten.mapped}


async def test_proven_publish_is_ended_and_its_volume_unstaged(forgotten: Forgotten) -> None:
    (result,) = await forgotten.gc()
    assert result.outcome == "undone"
    assert forgotten.called() == ["NodeUnpublishVolume", "NodeUnstageVolume"]
    assert forgotten.kernel.loops == {}
    assert not os.path.lexists(forgotten.mapped)


@pytest.mark.parametrize("where", ["publish/pv-1", "pv-1/dev"])
async def test_gc_keeps_what_a_new_pod_has_staged(forgotten: Forgotten, where: str) -> None:
    forgotten.kernel.mounted.clear()  # a reboot removes binds and loop devices, and leaves the files
    forgotten.kernel.loops.clear()
    new = Path(f"{forgotten.root}/{BASE}/{where}/new-pod")
    new.touch()
    os.mkdir(f"{forgotten.root}/pods/new-pod")
    old(new.parent)
    (result,) = await forgotten.gc()
    assert (result.outcome, forgotten.called()) == ("undone", ["NodeUnpublishVolume"])
    assert "it is published for pod new-pod" in result.steps[-1]


async def test_volume_of_a_new_pod_during_unpublish_is_not_unstaged(forgotten: Forgotten) -> None:
    forgotten.kernel.on_unmount = lambda: Path(forgotten.target).with_name("new-pod").touch()
    (result,) = await forgotten.gc()
    assert (result.outcome, forgotten.called()) == ("refused", ["NodeUnpublishVolume"])
    assert "[VolumeInUseAgain]" in result.message


async def test_gc_keeps_only_what_has_evidence_that_cannot_be_read(forgotten: Forgotten) -> None:
    forgotten.kernel.fails = OSError(errno.EIO, "Input/output error")
    (result,) = await forgotten.gc()
    assert (result.outcome, forgotten.called()) == ("kept", [])
    assert "Input/output error" in result.message


async def test_gc_unreadable_pod_directory_is_no_proof(
    forgotten: Forgotten, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.lstat

    def lstat(path: str) -> os.stat_result:
        if str(path).endswith(f"/pods/{POD}"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr("crust.cli.gc.forgotten.os.lstat", lstat)
    (result,) = await forgotten.gc()
    assert (result.outcome, forgotten.called()) == ("kept", [])
    assert "Input/output error" in result.message


@pytest.mark.parametrize("hidden", ["pods/", f"{BASE}/{PV}/data/vol_data.json"])
async def test_kubelets_path_that_is_not_seen_is_an_error(
    forgotten: Forgotten, hidden: str
) -> None:
    concerns = lies.Concerns(frozenset({f"{forgotten.root}/{hidden}"}), ())
    with (
        lies.failing(concerns, lies.Failure(0, errno.EIO)),
        pytest.raises(errors.CrustError, match="Input/output error"),
    ):
        await forgotten.gc()
    assert forgotten.called() == []


@pytest.mark.parametrize("hidden", ["publish/pv-1", "pv-1/dev"])
async def test_unreadable_directory_of_other_pods_ends_nothing(
    forgotten: Forgotten, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """Another pod may have the volume there."""
    real = os.listdir

    def listdir(path: str) -> list[str]:
        if path == f"{forgotten.root}/{BASE}/{hidden}":
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr("crust.host.process.syscalls.os.listdir", listdir)
    with pytest.raises(errors.CrustError, match=f"cannot list .*{hidden}"):
        await forgotten.gc()
    assert forgotten.called() == []


async def test_volume_that_another_pod_waits_for_stays_staged(forgotten: Forgotten) -> None:
    os.utime(forgotten.data)
    (result,) = await forgotten.gc()
    assert result.outcome == "undone"
    assert forgotten.called() == ["NodeUnpublishVolume"]


async def test_publish_of_a_pod_that_exists_is_not_forgotten(forgotten: Forgotten) -> None:
    os.mkdir(f"{forgotten.root}/pods/{POD}")
    assert await forgotten.gc() == ()
    shutil.rmtree(f"{forgotten.root}/pods")  # the kubelet's root is not mounted
    assert await forgotten.gc() == ()


async def test_private_directories_of_a_shim_are_not_forgotten(forgotten: Forgotten) -> None:
    private = Path(f"{forgotten.root}/{BASE}/publish/crust-{'a' * 40}/{'b' * 40}")
    private.parent.mkdir()
    private.touch()
    assert [result.publish.target for result in await forgotten.gc(dry_run=True)] == [
        forgotten.target
    ]


@pytest.mark.parametrize(
    ("seen", "check", "words"),
    [
        ({"hidden": "processes of the host"}, "visibility", "hidden from here"),
        ({"processes": ("postgres[9]",)}, "pod-processes", "postgres[9]"),
        ({"users": {DEVICE: Users((LOOP,), ("qemu[5] by fd 9",))}}, "device", "qemu[5]"),
        ({"users": {DEVICE: Users((LOOP, "/dev/loop9"), ())}}, "device", "/dev/loop9 is upon it"),
        (
            {"users": {DEVICE: Users((LOOP,), ()), LOOP: Users((), ("dd[4] by fd 3",))}},
            "device",
            f"{LOOP}: dd[4]",
        ),
        ({"bound": ["/mnt/rescue"]}, "binds", "/mnt/rescue"),
    ],
)
async def test_whatever_may_use_it_keeps_it(
    forgotten: Forgotten, seen: dict[str, Any], check: str, words: str
) -> None:
    vars(forgotten.kernel).update(seen)
    assert words in await forgotten.kept_for(check)


async def test_gc_two_devices_at_target_and_bind_prove_nothing(forgotten: Forgotten) -> None:
    forgotten.kernel.other_devices[forgotten.mapped] = "/dev/loop5"
    assert "different devices: /dev/loop7 and /dev/loop5" in await forgotten.kept_for("device")


async def test_recent_publish_is_left_alone(forgotten: Forgotten) -> None:
    os.utime(os.path.dirname(forgotten.target))
    assert "the grace period is 600 s" in await forgotten.kept_for("age")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", json.dumps({"driverName": "other", "volumeHandle": "v"})]
)
async def test_volume_that_is_not_known_is_kept(forgotten: Forgotten, text: str) -> None:
    forgotten.data.write_text(text)
    old(forgotten.data)
    await forgotten.kept_for("identity")


async def test_volume_with_a_claim_is_kept(forgotten: Forgotten) -> None:
    target = forgotten.node.places.target("two")
    await forgotten.node.co.publish(VOLUME, target)
    with forgotten.node.sandbox(target):
        assert "has claimed it" in await forgotten.kept_for("claim")
    assert "deferred at" in await forgotten.kept_for("claim")


async def test_unreadable_entry_keeps_everything(forgotten: Forgotten) -> None:
    await forgotten.node.co.publish("vol-x", forgotten.node.places.target("two"))
    (entry,) = forgotten.node.places.entries()
    Path(forgotten.node.places.volumes, entry, "mountInfo.json").write_text("{")
    assert "cannot be read" in await forgotten.kept_for("claim")


async def test_step_that_the_kernel_refuses_ends_it_and_is_reported(forgotten: Forgotten) -> None:
    forgotten.kernel.refuses = True
    (result,) = await forgotten.gc()
    assert result.outcome == "refused"
    assert "[DeviceInUse]" in result.message
    assert forgotten.called() == []


async def test_interrupted_settlement_is_found_and_finished(forgotten: Forgotten) -> None:
    os.unlink(forgotten.target)
    forgotten.kernel.mounted.clear()
    forgotten.kernel.loops.clear()
    old(os.path.dirname(forgotten.target))
    (result,) = await forgotten.gc()
    assert result.outcome == "undone"
    assert await forgotten.gc() == ()


async def test_deferred_volume_whose_pod_is_gone_is_unpublished(forgotten: Forgotten) -> None:
    node = forgotten.node
    shutil.rmtree(f"{forgotten.root}/{BASE}")
    private = f"{forgotten.root}/{BASE}/publish/crust-{'a' * 40}/{'b' * 40}"
    forgotten.kernel = FakeKernel(users={}, bound=[private])
    target = f"{forgotten.root}/pods/gone/volumes/kubernetes.io~csi/v/mount"
    os.makedirs(os.path.dirname(target))
    await node.co.publish("inline-1", target)
    os.rename(f"{forgotten.root}/pods/gone", f"{forgotten.root}/lost")
    (young,) = await forgotten.gc()
    assert [check.name for check in young.checks if not check.proven] == ["age"]
    options = collect.Options(node.places.run, forgotten.root, 0, dry_run=False)
    (result,) = await collect.collect(options, forgotten.kernel)
    assert (result.outcome, result.publish.kind) == ("undone", "deferred volume")
    assert node.places.entries() == []
