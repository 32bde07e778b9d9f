"""The look at a target and at a device before a publish changes anything there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

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
