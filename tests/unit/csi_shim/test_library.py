"""The library for drivers, also in a process that has its own csi_pb2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from crust.csi_shim import library
from tests.support.co import capability, publish_request
from tests.support.raised import raised

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
    assert json.loads(ran.stdout) == {
        "device": "/dev/loop1",
        "identity": 99,
        "plain": False,
        "told": [1, 20526, 20527, 20528],
        "untold": [1],
    }


def test_raw_block_volume_is_not_deferred_by_the_helper() -> None:
    request = publish_request("v", "/t", capability(block=True))
    with raised("CannotDeferRawBlock", match="raw block"):
        library.deferred_mount("/dev/loop1", "ext4", request)
