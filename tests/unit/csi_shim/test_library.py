"""The library in a process that has its own csi_pb2, around servicers of grpc.aio and of grpc."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from crust.csi_shim import library
from crust.csi_shim.servicers import BlockingRuntime
from crust.wire.csi.v1 import csi_pb2
from tests.support.drivers.fake_driver import FakeDriver

ROOT = Path(__file__).parents[3]
PROTO = ROOT / "specs" / "proto" / "crust" / "wire" / "csi" / "v1" / "csi.proto"


@pytest.fixture(scope="module")
def own_csi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated code of a CSI without crust's fields."""
    directory = tmp_path_factory.mktemp("own")
    text = re.sub(r".* (defer_fs_ops|deferred_mount) = .*\n", "", PROTO.read_text())
    (directory / "csi.proto").write_text(text)
    outputs = [f"--python_out={directory}", f"--grpc_python_out={directory}"]
    argv = [sys.executable, "-m", "grpc_tools.protoc", f"-I{directory}", *outputs, "csi.proto"]
    subprocess.run(argv, check=True, capture_output=True, cwd=directory)
    return directory


@pytest.mark.parametrize("order", ["driver-first", "crust-first"])
def test_process_with_its_own_csi_pb2_defers(own_csi: Path, order: str) -> None:
    argv = [sys.executable, "-m", "tests.support.drivers.drivers_own_csi", str(own_csi), order]
    ran = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for kind in ("async", "blocking"):
        answers = found[kind]
        code, sentence = answers.pop("driver-bug")
        assert answers == {
            "device": "/dev/loop1",
            "identity": 99,
            "plain": False,
            "told": [1, 20526, 20527, 20528],
            "untold": [1],
            "total": 9,
            "absent": ["NOT_FOUND", "no such volume"],
        }
        assert code == "INTERNAL"
        assert "NodePublishVolume failed in the driver's" in sentence
        assert "1234" not in sentence
        (error_id,) = re.findall(r"under id (\w+)", sentence)
        assert error_id in ran.stderr  # with standard logging, nothing configured
    assert "DriverBug: the password is 1234" in ran.stderr


class BlockingNode:
    def NodePublishVolume(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


def test_blocking_servicer_with_client_of_grpc_aio_is_refused() -> None:
    with pytest.raises(library.WrongKindOfServicer, match="connect_blocking"):
        library.wrap(BlockingNode(), library.RuntimeClient.__new__(library.RuntimeClient))


def test_servicer_of_grpc_aio_with_blocking_runtime_is_refused() -> None:
    client = library.RuntimeClient.__new__(library.RuntimeClient)
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(library.WrongKindOfServicer, match="RuntimeClient"):
            library.wrap(FakeDriver(), BlockingRuntime(client, loop))
    finally:
        loop.close()


def test_raw_block_volume_is_not_deferred_by_the_helper() -> None:
    request = csi_pb2.NodePublishVolumeRequest(volume_id="v", target_path="/t", defer_fs_ops=True)
    request.volume_capability.block.SetInParent()
    request.volume_capability.access_mode.mode = csi_pb2.VolumeCapability.AccessMode.Mode.Value(
        "SINGLE_NODE_WRITER"
    )
    with pytest.raises(library.RawBlockNotDeferred, match="raw block"):
        library.deferred_mount("/dev/loop1", "ext4", request)
