"""The size limit of maps: a kubelet's own keys do not count, and every call's secrets are checked."""

import grpc
import pytest

from crust.rpc import channel
from crust.rpc.messages import limits
from crust.rpc.serving import server
from crust.rpc.serving.service import Service, methods_of
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.faults.refusals import refused

TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
FULL = {"key": "x" * (limits.MAP_MAX_BYTES - 3)}


def test_a_map_of_4_kib_is_fine_and_one_byte_more_is_not() -> None:
    assert limits.mapping(FULL, "parameters") == FULL
    limits.check_context(FULL, "volume_context")
    for check in (limits.mapping, limits.check_context):
        with pytest.raises(limits.FieldTooLong, match="4097 bytes"):
            check({**FULL, "y": ""}, "volume_context")


def test_kubelet_keys_count_in_parameters_and_not_in_contexts() -> None:
    grown = {**FULL, TOKENS: "t" * 9000}
    limits.check_context(grown, "volume_context")
    with pytest.raises(limits.FieldTooLong):
        limits.mapping(grown, "parameters")


class Deleter:
    """Accepts every DeleteVolume."""

    async def DeleteVolume(
        self, request: csi_pb2.DeleteVolumeRequest, context: object
    ) -> csi_pb2.DeleteVolumeResponse:
        return csi_pb2.DeleteVolumeResponse()


async def test_too_long_secrets_are_refused_without_being_shown(short: str) -> None:
    path = f"{short}/a.sock"
    methods = methods_of(Deleter(), csi_pb2.DESCRIPTOR.services_by_name["Controller"])
    async with server.serving(path, Service("t", methods)), channel.connect(path) as c:
        delete = csi_pb2_grpc.ControllerStub(c).DeleteVolume
        await delete(csi_pb2.DeleteVolumeRequest(volume_id="a", secrets=FULL))
        longer = csi_pb2.DeleteVolumeRequest(volume_id="a", secrets={**FULL, "y": ""})
        code = grpc.StatusCode.INVALID_ARGUMENT
        assert "xxx" not in await refused(delete(longer), code, "secrets is too long")
