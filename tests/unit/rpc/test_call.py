"""The fields of a request: what is kept of it, and who may name it."""

import pytest

from crust.rpc.call import fields_of
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import handlers_pb2


def test_passed_request_is_read_and_not_kept() -> None:
    request = csi_pb2.NodePublishVolumeRequest(
        volume_id="v", target_path="/t", staging_target_path="/s", secrets={"a": "hidden"}
    )
    fields = fields_of(request, "d")
    assert {key: fields[key] for key in ("driver", "volume_id", "target")} == {
        "driver": "d",
        "volume_id": "v",
        "target": "/t",
    }
    assert "hidden" not in repr(fields)


@pytest.mark.parametrize("named", ["", "a b", "a\nb", "x" * 65, b"bytes", "0a1b2c"])
def test_id_of_the_caller_is_taken_if_it_is_one(named: str | bytes) -> None:
    fields = fields_of(None, metadata=(("crust-request-id", named),))
    assert (fields["request_id"] == named) is (named == "0a1b2c")
    assert fields["request_id"] == named or len(fields["request_id"]) == 12


def test_volume_of_request_with_target_alone_is_in_metadata() -> None:
    request = handlers_pb2.GetVolumeStatsRequest(target_path="/t")
    fields = fields_of(request, metadata=(("crust-volume-bin", "d\0é".encode()),))
    assert (fields["driver"], fields["volume_id"], fields["target"]) == ("d", "é", "/t")


def test_long_name_is_cut() -> None:
    fields = fields_of(csi_pb2.DeleteVolumeRequest(volume_id="v" * 9999))
    assert len(fields["volume_id"]) == 256
