"""ListVolumes, ControllerGetVolume, GetCapacity (C-131 to C-142)."""

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator.calls import Code
from crust_conformance.orchestrator.capabilities import NODE, PUBLISH
from crust_conformance.orchestrator.co import Co

_HEALTH_LIST = "controller.LIST_VOLUME_HEALTH"
_PUBLISHED_NODES = {NODE, PUBLISH, "controller.LIST_VOLUMES_PUBLISHED_NODES"}
_COUNT = 7


def test_c131_list_has_every_volume_as_created(co: Co) -> None:
    volumes = [co.volume() for _ in range(3)]
    listed = {entry.volume.volume_id: entry.volume for entry in _all(co, 0)}
    for volume in volumes:
        assert volume.volume_id in listed
        listed_volume = listed[volume.volume_id]
        assert listed_volume.capacity_bytes in (0, volume.capacity_bytes)
        assert listed_volume.volume_context == volume.volume_context
    co.delete(volumes[0].volume_id)
    assert volumes[0].volume_id not in {entry.volume.volume_id for entry in _all(co, 0)}


def test_c132_a_list_is_not_asked_for_in_odd_ways(co: Co) -> None:
    negative = csi_pb2.ListVolumesRequest(max_entries=-1)
    with co.beyond():
        co.answered(negative, Code.INVALID_ARGUMENT)
    odd = csi_pb2.ListVolumesRequest(starting_token="conformance: no such token")
    co.answered(odd, Code.ABORTED)


def test_c133_a_list_comes_in_pages(co: Co) -> None:
    created = {co.volume().volume_id for _ in range(_COUNT)}
    listed = [entry.volume.volume_id for entry in _all(co, 2)]
    assert len(listed) == len(set(listed)), "a volume is listed twice"
    assert created <= set(listed)


def test_c134_pages_list_each_volume_once_while_others_change(co: Co) -> None:
    volumes = [co.volume().volume_id for _ in range(_COUNT)]
    listed: list[str] = []
    deleted: set[str] = set()
    token = ""
    while True:
        entries, token = _page(co, 2, token)
        listed += [entry.volume.volume_id for entry in entries]
        if not token:
            break
        ours = [id_ for id_ in listed if id_ in volumes and id_ not in deleted]
        if ours and len(deleted) < 3:
            deleted.add(ours[-1])  # a token may point at it
            co.delete(ours[-1])
            co.volume()
    assert len(listed) == len(set(listed)), "a volume is listed twice"
    assert set(volumes) - deleted <= set(listed), "a volume that stayed was not listed"


def test_c135_list_has_published_node_ids(co: Co) -> None:
    volume = co.volume()
    with co.beyond():
        assert _nodes(co, volume.volume_id) == []
    co.attach(volume)
    listed = _nodes(co, volume.volume_id)
    assert co.node_id() in listed
    co.detach(volume.volume_id)
    with co.beyond():
        assert listed == [co.node_id()]
        assert _nodes(co, volume.volume_id) == []


def test_c136_get_volume_returns_volume_as_created(co: Co) -> None:
    volume = co.volume()
    request = csi_pb2.ControllerGetVolumeRequest(volume_id=volume.volume_id)
    answer = co.ask(request)
    assert answer.volume.volume_id == volume.volume_id
    assert answer.volume.capacity_bytes in (0, volume.capacity_bytes)
    if co.has >= _PUBLISHED_NODES:
        co.attach(volume)
        assert co.node_id() in co.ask(request).status.published_node_ids
    co.refused_with_unknown(request, "volume_id")
    co.refused_without(request, "volume_id")


def test_c137_lists_leave_out_ephemeral_volumes(co: Co) -> None:
    earlier = _ids(co)
    target = co.target()
    co.ask(co.ephemeral_request(target))
    assert _ids(co) <= earlier, "an ephemeral volume is listed"


def test_c138_listed_condition_of_new_volume_has_message(co: Co) -> None:
    volume = co.volume()
    _check_condition(co, _listed(co, volume.volume_id).status)


def test_c139_condition_of_new_volume_has_message(co: Co) -> None:
    request = csi_pb2.ControllerGetVolumeRequest(volume_id=co.volume().volume_id)
    _check_condition(co, co.ask(request).status)


def _check_condition(
    co: Co,
    status: csi_pb2.ListVolumesResponse.VolumeStatus
    | csi_pb2.ControllerGetVolumeResponse.VolumeStatus,
) -> None:
    assert status.HasField("volume_condition"), "there is no condition"
    assert status.volume_condition.message, "the condition has no message"
    with co.beyond():
        assert not status.volume_condition.abnormal, status.volume_condition.message


def test_c141_capacity_is_not_negative(co: Co) -> None:
    answer = co.ask(csi_pb2.GetCapacityRequest(parameters=co.options.parameters.parameters))
    assert answer.available_capacity >= 0
    if answer.HasField("maximum_volume_size") and answer.HasField("minimum_volume_size"):
        with co.beyond():
            assert answer.minimum_volume_size.value <= answer.maximum_volume_size.value


def test_c142_a_volume_above_the_maximum_is_refused(co: Co) -> None:
    answer = co.ask(csi_pb2.GetCapacityRequest(parameters=co.options.parameters.parameters))
    largest = answer.maximum_volume_size.value or answer.available_capacity
    above = co.create_request(size_bytes=2 * largest + co.options.parameters.size_bytes)
    code = co.answered(above, Code.OK, Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED)
    with co.beyond():
        assert code is not Code.OK, "a volume larger than the capacity was created"


def _page(
    co: Co, max_entries: int, token: str
) -> tuple[list[csi_pb2.ListVolumesResponse.Entry], str]:
    request = csi_pb2.ListVolumesRequest(max_entries=max_entries, starting_token=token)
    answer = co.ask(request)
    assert not max_entries or len(answer.entries) <= max_entries
    return list(answer.entries), answer.next_token


def _all(co: Co, max_entries: int) -> list[csi_pb2.ListVolumesResponse.Entry]:
    entries, token = _page(co, max_entries, "")
    while token:
        page, token = _page(co, max_entries, token)
        entries += page
    return entries


def _ids(co: Co) -> set[str]:
    """The ids in all lists of volumes. Other COs may delete volumes meanwhile, but create none."""
    ids = {entry.volume.volume_id for entry in _all(co, 0)}
    if _HEALTH_LIST in co.has:
        request = csi_pb2.ControllerListVolumeHealthRequest()
        answer = co.ask(request)
        ids |= {entry.volume_id for entry in answer.entries}
    return ids


def _listed(co: Co, volume_id: str) -> csi_pb2.ListVolumesResponse.Entry:
    entries = [entry for entry in _all(co, 0) if entry.volume.volume_id == volume_id]
    assert entries, "the volume is not listed"
    return entries[0]


def _nodes(co: Co, volume_id: str) -> list[str]:
    return list(_listed(co, volume_id).status.published_node_ids)
