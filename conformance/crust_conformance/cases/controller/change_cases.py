"""ControllerExpandVolume, ControllerModifyVolume (C-171 to C-176, C-181 to C-187).

CSI has no call that returns a volume's mutable parameters, so their cases check answers and not effects.
"""

from typing import Any

import grpc

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator import expansion
from crust_conformance.orchestrator.calls import UNKNOWN, Code
from crust_conformance.orchestrator.co import SIDECAR_KEYS, Co
from crust_conformance.orchestrator.volume_capabilities import NO_FILESYSTEM, block, mount

_CALLERS = 6
_UNKNOWN = "crust-conformance-unknown"


def test_c171_expand_needs_a_volume_and_a_size(co: Co) -> None:
    request = expansion.controller_request(co, co.volume())
    co.refused_without(request, "volume_id", "capacity_range")
    co.refused_with_unknown(request, "volume_id")


def test_c172_a_volume_grows_and_never_shrinks(co: Co) -> None:
    volume = co.volume()
    size = expansion.doubled(co, volume)
    for _ in range(2):
        assert co.ask(expansion.controller_request(co, volume, size)).capacity_bytes >= size
    smaller = size
    with co.should():
        smaller = co.ask(expansion.controller_request(co, volume, 1)).capacity_bytes
    assert smaller >= size, "the volume has shrunk"


def test_c173_expand_beyond_limits_is_out_of_range(co: Co) -> None:
    volume = co.volume()
    request = expansion.controller_request(co, volume, 1 << 60)
    code = co.answered(request, Code.OK, Code.OUT_OF_RANGE, Code.RESOURCE_EXHAUSTED)
    if code is Code.OK:  # the volume has no size of its own
        assert co.ask(request).capacity_bytes >= request.capacity_range.required_bytes
    request.capacity_range.CopyFrom(csi_pb2.CapacityRange(required_bytes=1, limit_bytes=2))
    with co.beyond():
        co.answered(request, Code.OUT_OF_RANGE)


def test_c174_a_raw_volume_needs_no_expansion_on_the_node(co: Co) -> None:
    volume = co.volume(block())
    size = expansion.doubled(co, volume)
    assert not co.ask(
        expansion.controller_request(co, volume, size, block())
    ).node_expansion_required


def test_c175_expand_with_unsupported_capability_is_invalid(co: Co) -> None:
    volume = co.volume()
    size = expansion.doubled(co, volume)
    request = expansion.controller_request(co, volume, size, mount(NO_FILESYSTEM))
    co.answered(request, Code.INVALID_ARGUMENT)
    assert co.ask(expansion.controller_request(co, volume, 1)).capacity_bytes < size


def test_c176_offline_expand_of_published_volume_is_failed_precondition(co: Co) -> None:
    volume = co.volume()
    co.use(volume)
    co.answered(expansion.controller_request(co, volume), Code.FAILED_PRECONDITION)


def test_c181_modify_needs_a_volume(co: Co) -> None:
    request = _modify(co, csi_pb2.Volume(volume_id=UNKNOWN))
    if request.mutable_parameters:
        co.answered(request, Code.NOT_FOUND)
    request.mutable_parameters.setdefault("crust-conformance", "1")
    co.refused_without(request, "volume_id")


def test_c182_modify_is_idempotent_and_refuses_unknown_keys(co: Co) -> None:
    volume = co.volume()
    request = _modify(co, volume)
    co.ask(request)
    co.ask(request)
    request.mutable_parameters[_UNKNOWN] = "1"
    co.answered(request, Code.INVALID_ARGUMENT)


def test_c183_a_volume_is_made_with_mutable_parameters(co: Co) -> None:
    request = co.create_request()
    request.mutable_parameters.update(co.options.parameters.mutable_parameters)
    request.mutable_parameters[_UNKNOWN] = "1"
    code, _ = co.outcome(request)
    with co.beyond():
        assert code is Code.INVALID_ARGUMENT, (
            f"an unknown key was answered {code.name}, must be INVALID_ARGUMENT"
        )
    if code is Code.OK:  # with a key that the driver ignores, or knows
        request.name = co.name()
    del request.mutable_parameters[_UNKNOWN]
    volume = co.create(request)
    second = co.ask(request).volume
    assert second.volume_id == volume.volume_id


def test_c184_modify_accepts_keys_of_sidecars(co: Co) -> None:
    request = _modify(co, co.volume())
    request.mutable_parameters.update(SIDECAR_KEYS)
    co.ask(request)


def test_c185_a_volume_in_use_is_modified(co: Co) -> None:
    volume, target = co.used(file=b"kept")
    co.ask(_modify(co, volume))
    assert co.file(target) == b"kept"
    assert co.host.mounts_at(target) == 1


def test_c186_concurrent_identical_modifies_succeed(co: Co) -> None:
    request = _modify(co, co.volume())
    _none_failed(co, co.concurrently([request] * _CALLERS))
    co.until_final(request)


def test_c187_concurrent_modify_and_expansion_both_succeed(co: Co) -> None:
    volume = co.volume()
    modify, expand = _modify(co, volume), expansion.controller_request(co, volume)
    _none_failed(co, co.concurrently([modify, expand]))
    co.until_final(modify)
    assert co.until_final(expand).capacity_bytes >= expansion.doubled(co, volume)


def _modify(co: Co, volume: csi_pb2.Volume) -> csi_pb2.ControllerModifyVolumeRequest:
    return csi_pb2.ControllerModifyVolumeRequest(
        volume_id=volume.volume_id,
        mutable_parameters=co.options.parameters.mutable_parameters,
    )


def _none_failed(co: Co, answers: list[Any]) -> None:
    failed = {answer.name for answer in answers if isinstance(answer, grpc.StatusCode)}
    with co.should():
        assert failed <= {Code.ABORTED.name}, f"{failed} for one of several calls at once"
