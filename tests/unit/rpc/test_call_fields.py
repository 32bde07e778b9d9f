"""The fields that every log line about a call has."""

import pytest

from crust.rpc.messages.call_fields import CallFields
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import handlers_pb2

PUBLISH = "/csi.v1.Node/NodePublishVolume"


def test_passed_request_is_read_and_not_kept() -> None:
    request = csi_pb2.NodePublishVolumeRequest(
        volume_id="v", target_path="/t", staging_target_path="/s", secrets={"a": "hidden"}
    )
    fields = CallFields(PUBLISH, request.SerializeToString(), lambda: "d")
    assert {key: fields[key] for key in ("driver", "volume_id", "target")} == {
        "driver": "d",
        "volume_id": "v",
        "target": "/t",
    }
    assert not [each for each in vars(fields).values() if b"hidden" in repr(each).encode()]


@pytest.mark.parametrize("data", [b"\xff\xff", b""])
def test_request_that_is_no_message_has_the_id_alone(data: bytes) -> None:
    assert list(CallFields(PUBLISH, data)) == ["request_id"]
    assert list(CallFields("/other.Service/Method", data)) == ["request_id"]


def test_id_of_the_caller_is_taken() -> None:
    fields = CallFields(PUBLISH, b"", metadata=[("crust-request-id", "0a1b2c")])
    assert fields["request_id"] == "0a1b2c"


@pytest.mark.parametrize("named", ["", "a b", "a\nb", "x" * 65, b"bytes"])
def test_id_that_is_none_is_replaced(named: str | bytes) -> None:
    fields = CallFields(PUBLISH, b"", metadata=[("crust-request-id", named)])
    assert len(fields["request_id"]) == 12


def test_volume_of_a_request_with_the_target_alone_is_in_the_metadata() -> None:
    request = handlers_pb2.GetVolumeStatsRequest(target_path="/t")
    fields = CallFields("/x", request, metadata=[("crust-volume-bin", "d\0é".encode())])
    assert (fields["driver"], fields["volume_id"], fields["target"]) == ("d", "é", "/t")


def test_a_long_name_is_cut() -> None:
    fields = CallFields("/x", csi_pb2.DeleteVolumeRequest(volume_id="v" * 9999))
    assert len(fields["volume_id"]) == 256


def test_fields_that_a_line_is_written_from_do_not_change_below_it() -> None:
    """A thread of the call writes a line, and the call is settled meanwhile."""
    fields = CallFields("/x", csi_pb2.DeleteVolumeRequest(volume_id="v"))
    line = iter(vars(fields)["_found"].items())
    next(line)
    fields.settle()
    fields.name_volume("d", "other")
    assert list(line) == []
    assert dict(fields) == {
        "request_id": fields.request_id,
        "driver": "d",
        "volume_id": "other",
    }
