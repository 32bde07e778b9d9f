"""The manual steps in docs/operations.md do what the page says."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from crust.wire.v1 import inspect_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes import node as nodes

Code = grpc.StatusCode


@pytest.fixture
def places() -> Iterator[nodes.Places]:
    """An empty node's directories, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        yield nodes.Places.make(root)


async def test_unreadable_entry_moved_away_lets_unpublish_succeed(places: nodes.Places) -> None:
    """ "An entry is unreadable", step 4."""
    target = places.target("one")
    async with nodes.running(places) as node, node.handler():
        await node.co.publish("vol-1", target)
        entry = node.entry(target)
        assert entry is not None
        Path(f"{entry.directory}/mountInfo.json").write_text("{")
        answer = await node.inspect.ListDeferredVolumes(inspect_pb2.ListDeferredVolumesRequest())
        assert [each.state for each in answer.volumes] == ["unreadable"]
        await refused(node.co.unpublish("vol-1", target), Code.DATA_LOSS, "cannot be read")
        shutil.move(entry.directory, f"{places.root}/evidence")
        answer = await node.inspect.ListDeferredVolumes(inspect_pb2.ListDeferredVolumesRequest())
        assert list(answer.volumes) == []
        await node.co.unpublish("vol-1", target)
        node.check_untouched(target)


async def test_entry_from_before_a_reboot_is_removed_by_unpublish(places: nodes.Places) -> None:
    """ "After a reboot", where /run is not a tmpfs: mounts and the driver's memory are gone, entries are not."""
    old, new = places.target("old"), places.target("new")
    async with nodes.running(places) as node, node.handler():
        await node.co.publish("vol-1", old)
        os.unlink(f"{old}/.guarded")
    async with nodes.running(places) as node, node.handler():
        await refused(node.co.publish("vol-1", new), Code.FAILED_PRECONDITION, old)
        await node.co.unpublish("vol-1", old)
        await node.co.publish("vol-1", new)
        node.check_published("vol-1", new)
        assert node.entry(old) is None


async def test_bug_report_files_contain_no_secret(places: nodes.Places) -> None:
    """ "For a bug report": records, of a volume whose publish carried secrets and a token."""
    target = places.target("one")
    async with nodes.running(places) as node, node.handler():
        await node.co.publish(
            "vol-1",
            target,
            secrets={"password": "hunter2"},
            volume_context={"csi.storage.k8s.io/serviceAccount.tokens": "hunter2"},
        )
        entry = node.entry(target)
        assert entry is not None
        files = sorted(Path(entry.directory).iterdir())
        assert [each.name for each in files] == ["claim.lock", "mountInfo.json"]
        assert all("hunter2" not in each.read_text() for each in files)
        assert json.loads(files[1].read_text())["crust"]["volume_id"] == "vol-1"
