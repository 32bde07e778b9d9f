"""The look at a target and at a device before a publish changes anything there; and where the kernel does not answer.

Real guard mounts: tests/integration/proxy/test_kernel.py.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import errors, volumes
from crust.host.files import target_paths
from crust.host.mounts import mount_api
from crust.proxy.guard import Targets
from crust.proxy.target import MountStack, TargetState
from tests.support.faults import lies
from tests.support.faults.refusals import refused
from tests.support.nodes.fake_node import FakeNode

Code = grpc.StatusCode


def _outside(node: FakeNode) -> str:
    """A target that is not below a root of the kubelet's."""
    os.mkdir(f"{node.places.root}/elsewhere")
    return f"{node.places.root}/elsewhere/mount"


def _behind_a_link(node: FakeNode) -> str:
    os.symlink(os.path.dirname(_outside(node)), f"{node.places.kubelet}/link")
    return f"{node.places.kubelet}/link/mount"


def _a_link(node: FakeNode) -> str:
    os.symlink(os.path.dirname(_outside(node)), node.places.target("one"))
    return node.places.target("one")


def _without_a_parent(node: FakeNode) -> str:
    return f"{node.places.kubelet}/pods/none/mount"


def _mounted(node: FakeNode) -> str:
    node.targets.foreign.add(node.places.target("one"))
    return node.places.target("one")


def _with_files(node: FakeNode) -> str:
    os.makedirs(f"{node.places.target('one')}/data")
    return node.places.target("one")


@pytest.mark.parametrize(
    ("prepare", "code", "words"),
    [
        (_outside, Code.PERMISSION_DENIED, ("{target}", "{kubelet}", "allowed roots")),
        (_behind_a_link, Code.PERMISSION_DENIED, ("symbolic link", "'link'")),
        (_a_link, Code.PERMISSION_DENIED, ("{target}", "symbolic link")),
        (_without_a_parent, Code.INTERNAL, ("{target}", "FileMissing")),
        (_mounted, Code.UNAVAILABLE, ("{target}", "/dev/sdb1", "unpublish")),
        (_with_files, Code.ALREADY_EXISTS, ("{target}",)),
    ],
)
async def test_publish_at_foreign_or_used_target_changes_nothing(
    kata: FakeNode, prepare: Callable[[FakeNode], str], code: Code, words: tuple[str, ...]
) -> None:
    target, root = prepare(kata), Path(kata.places.root)
    names = {"target": target, "kubelet": kata.places.kubelet}
    before = set(root.rglob("*"))
    publish = kata.co.publish("vol-1", target)
    await refused(publish, code, *(word.format(**names) for word in words))
    assert set(root.rglob("*")) == before
    assert kata.driver.called("NodePublishVolume") == []
    assert kata.entry(target) is None


@pytest.mark.spec("D-21")
async def test_publish_of_device_mounted_on_host_is_refused(kata: FakeNode, target: str) -> None:
    kata.targets.mounted_devices["/dev/fake-vol-1"] = False
    words = ("/dev/fake-vol-1", "mounted at /mnt", "unmount it")
    await refused(kata.co.publish("vol-1", target), Code.FAILED_PRECONDITION, *words)
    kata.check_untouched(target)


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (
            lambda answer: setattr(answer.block_device.identity, "disk_sequence", 77),
            ("the driver reports", "@77"),
        ),
        (
            lambda answer: setattr(answer.block_device, "path", "/nowhere/vol-1"),
            ("there is no /nowhere/vol-1",),
        ),
    ],
)
async def test_device_that_the_driver_misreports_is_refused(
    kata: FakeNode, target: str, alter: Callable[[Any], None], words: tuple[str, ...]
) -> None:
    kata.driver.alter = alter
    await refused(kata.co.publish("vol-1", target), Code.INTERNAL, *words)
    kata.check_untouched(target)


def test_guard_is_restored_over_target_that_cannot_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then every write there reaches the node's disk. Here it cannot be sealed either."""

    def fail(*_: object) -> None:
        raise errors.RuntimeFailed("the disk answers with errors")

    mounted: list[str] = []
    monkeypatch.setattr(target_paths, "remove_empty_below", fail)
    monkeypatch.setattr(mount_api, "mount_guard", lambda path, **_: mounted.append(path))
    target = volumes.TargetPath.parse(f"{tmp_path}/mount")
    with pytest.raises(errors.NotFound):
        Targets([str(tmp_path)]).restore_guard(target, None)
    assert len(mounted) == 1


def test_guard_that_is_not_seen_is_not_unmounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its group and its names would be forgotten, and it could not be restored as it was."""
    monkeypatch.setattr(Targets, "look", lambda *_: TargetState(stack=MountStack.GUARD))
    targets, target = Targets([str(tmp_path)]), volumes.TargetPath.parse(str(tmp_path))
    assert targets.guard_at(target) is not None
    guard = lies.Concerns(frozenset({str(tmp_path)}), ())
    for number in range(2):
        failure, refused = lies.Failure(number, errno.EIO), pytest.raises(errors.RuntimeFailed)
        with lies.failing(guard, failure), refused:
            targets.guard_at(target)
