"""Health of volumes and of the storage behind them, at controller and node (C-145, C-146, C-261, C-262)."""

from typing import Any

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator.calls import Code
from crust_conformance.orchestrator.co import Co


def test_c145_get_volume_health_of_new_volume_is_healthy(co: Co) -> None:
    volume_id = co.volume().volume_id
    _check_healthy(co, csi_pb2.ControllerGetVolumeHealthRequest(volume_id=volume_id))


def test_c146_list_volume_health_leaves_out_new_volume(co: Co) -> None:
    volume = co.volume()
    request = csi_pb2.ControllerListVolumeHealthRequest
    unhealthy = [entry.volume_id for entry in co.ask(request()).entries if entry.health_statuses]
    with co.beyond():
        assert volume.volume_id not in unhealthy
        co.answered(request(max_entries=-1), Code.INVALID_ARGUMENT)
    co.answered(request(starting_token="conformance: no such token"), Code.ABORTED)


def test_c261_node_health_of_new_volume_is_healthy(co: Co) -> None:
    volume, target = co.used()
    request = csi_pb2.NodeGetVolumeHealthRequest(
        volume_id=volume.volume_id, volume_publish_path=str(target)
    )
    _check_healthy(co, request)


def test_c262_storage_health_entries_have_a_status(co: Co) -> None:
    request = csi_pb2.NodeGetStorageHealthRequest()
    for entry in co.ask(request).backend_health:
        assert entry.status, "an entry of status 0 says nothing"


def _check_healthy(co: Co, request: Any) -> None:
    """Check the answer for a new volume, whose id the request has."""
    health = co.ask(request).volume_health
    assert health.volume_id == request.volume_id
    with co.beyond():
        assert not list(health.health_statuses)
    co.refused_with_unknown(request, "volume_id")
    co.refused_without(request, "volume_id")
