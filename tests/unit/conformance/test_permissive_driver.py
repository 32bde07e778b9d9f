"""Drivers that conform in an unusual way: one that uses every freedom of CSI, and one of two plugins."""

import os
import tempfile
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.conformance import suite
from crust.conformance.options import MIB, Options, Parameters
from crust.conformance.orchestrator.calls import Calls, Channels, connected
from crust.conformance.results import Results
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2
from tests.support.memory_csi.driver import MemoryHost, serving
from tests.support.memory_csi.permissive import AcceptingDriver, PermissiveDriver, SharedHost
from tests.support.memory_csi.state import Code, Refused


@pytest.mark.timeout(180)
def test_permissive_driver_passes_with_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = PermissiveDriver()
    socket = tmp_path / "plugin" / "csi.sock"
    socket.parent.mkdir()
    small = Parameters(size_bytes=MIB)
    given = Options(socket=str(socket), target_root=tmp_path, parameters=small, timeout_s=20.0)
    with serving(driver, socket):
        outcome = suite.run(given, SharedHost(driver))
    assert not outcome.failed, capsys.readouterr().out
    assert outcome.exit_code == 0
    assert not driver.state.volumes
    assert not driver.state.targets
    assert not driver.state.snapshots
    assert {"C-005", "C-010", "C-114", "C-216"} <= outcome.warned
    assert {"C-105", "C-109", "C-123", "C-134"} <= outcome.noted
    assert {"C-112", "C-202", "C-213", "C-221", "C-252", "C-305"} <= outcome.passed
    assert outcome.skipped["C-214"] == "driver.block"
    assert outcome.skipped["C-206"] == "driver.checks-fs-type"
    assert "C-244" in outcome.passed, "that it speaks CSI 1.12 is seen"


class StuckDriver(AcceptingDriver):
    """Deletes no volume."""

    def _find(self, method: str) -> Any:
        if method == "DeleteVolume":
            raise Refused(Code.INTERNAL, "the disk is stuck")
        return super()._find(method)


def run_accepting(driver: AcceptingDriver, directory: Path, root: Path) -> Results:
    """The cases in which a driver has to refuse what creates, stages, attaches or publishes."""
    driver.log = directory / "log"
    driver.log.touch()
    socket = directory / "csi.sock"
    given = Options(
        socket=str(socket),
        target_root=root,
        profile="1.13",
        parameters=Parameters(size_bytes=MIB, fs_types=("ext4",), block=True),
        log=driver.log,
        only=("22", "23", "110", "153", "314", "315", "601", "602"),
        timeout_s=20.0,
    )
    with serving(driver, socket):
        return suite.run(given, MemoryHost(driver), quiet=True)


def test_accepted_refusals_leave_nothing_on_the_driver(tmp_path: Path) -> None:
    driver = AcceptingDriver("1.13")
    with tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp") as root:
        outcome = run_accepting(driver, tmp_path, Path(root))
        assert os.listdir(root) == []
    state = driver.state
    assert (state.volumes, state.snapshots, state.groups, state.targets) == ({}, {}, {}, {})
    assert outcome.noted >= {"C-022", "C-023", "C-110"}
    assert "C-601" in outcome.passed, "its undo is of the target that it published"
    assert outcome.failed == {"C-153"}
    found = [finding.why for result in outcome.each for finding in result.findings]
    assert not [why for why in found if "not removed" in why]


def test_volume_that_the_driver_does_not_delete_is_named(tmp_path: Path) -> None:
    driver = StuckDriver("1.13")
    with tempfile.TemporaryDirectory(prefix="ct-", dir="/tmp") as root:
        outcome = run_accepting(driver, tmp_path, Path(root))
    found = "\n".join(finding.why for result in outcome.each for finding in result.findings)
    left = [f"not removed (volume_id {volume_id})" for volume_id in driver.state.volumes]
    assert left
    assert [why for why in left if why not in found] == []


class Recorder(grpc.GenericRpcHandler):
    """Answers everything with an empty message."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        self.methods.append(method.rpartition("/")[2])
        if method.startswith("/csi.v1.SnapshotMetadata/"):
            return grpc.unary_stream_rpc_method_handler(lambda request, context: iter((b"",)))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


@contextmanager
def recording(socket: Path) -> Iterator[Recorder]:
    """A server on the socket while the block runs."""
    recorder = Recorder()
    server = grpc.server(futures.ThreadPoolExecutor(1), [recorder])
    server.add_insecure_port(channel.target_of(str(socket)))
    server.start()
    try:
        yield recorder
    finally:
        server.stop(None).wait()


def _call_each(channels: Channels) -> None:
    calls = Calls(channels, 10.0)
    calls.ask(csi_pb2.ProbeRequest())
    calls.ask(csi_pb2.NodeGetInfoRequest())
    calls.ask(csi_pb2.ListVolumesRequest())
    assert len(calls.ask(csi_pb2.GetMetadataAllocatedRequest())) == 1


def test_calls_of_the_node_go_to_the_node_part_alone(tmp_path: Path) -> None:
    with recording(tmp_path / "n.sock") as node, recording(tmp_path / "c.sock") as controller:
        with connected(str(tmp_path / "n.sock"), str(tmp_path / "c.sock")) as channels:
            _call_each(channels)
        assert node.methods == ["NodeGetInfo"]
        assert controller.methods == ["Probe", "ListVolumes", "GetMetadataAllocated"]


def test_one_socket_gets_all_calls(tmp_path: Path) -> None:
    with recording(tmp_path / "n.sock") as node:
        with connected(str(tmp_path / "n.sock")) as channels:
            _call_each(channels)
        assert len(node.methods) == 4
