"""Mutable parameters, from CreateVolume to a modify that does not come alone (C-181 to C-187).

CSI has no call that returns a volume's mutable parameters, so these cases check answers and not effects.
"""

from typing import Any

import grpc

from crust.conformance.case import CREATE, EXPAND, MODIFY, NODE, beyond, case, must, should
from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_CALLERS = 6
_UNKNOWN = "crust-conformance-unknown"
_GIVEN = "parameters.mutable_parameters"


@case(181, CREATE, MODIFY)
@must(
    "ControllerModifyVolume Errors",
    "a volume that does not exist MUST be NOT_FOUND; volume_id is REQUIRED",
)
def test_modify_needs_a_volume(co: Co) -> None:
    """ControllerModifyVolume: INVALID_ARGUMENT without an id, NOT_FOUND for no such volume."""
    request = csi_pb2.ControllerModifyVolumeRequest
    parameters = co.options.parameters.mutable_parameters or {"crust-conformance": "1"}
    call = co.controller.ControllerModifyVolume
    co.refused(call, request(mutable_parameters=parameters), Code.INVALID_ARGUMENT)
    if co.options.parameters.mutable_parameters:
        unknown = request(volume_id=UNKNOWN_VOLUME, mutable_parameters=parameters)
        co.refused(call, unknown, Code.NOT_FOUND)


@case(182, CREATE, MODIFY, _GIVEN)
@must(
    "ControllerModifyVolume",
    "this operation MUST be idempotent; parameters that are not supported MUST be INVALID_ARGUMENT",
)
def test_modify_is_idempotent_and_refuses_unknown_keys(co: Co) -> None:
    """ControllerModifyVolume: OK again; a key that is not known is INVALID_ARGUMENT, alone and among known
    ones.
    """
    volume = co.volume()
    request = csi_pb2.ControllerModifyVolumeRequest(
        volume_id=volume.volume_id, mutable_parameters=co.options.parameters.mutable_parameters
    )
    call = co.controller.ControllerModifyVolume
    co.ask(call, request)
    co.ask(call, request)
    request.mutable_parameters[_UNKNOWN] = "1"
    co.refused(call, request, Code.INVALID_ARGUMENT)


@case(183, CREATE, MODIFY, _GIVEN)
@must("CreateVolume", "idempotent with mutable_parameters, too: MUST reply OK with the same volume")
@beyond(
    "CreateVolume",
    "the plugin is responsible for validating mutable_parameters; whether it refuses "
    "unknown ones is left open",
)
def test_a_volume_is_made_with_mutable_parameters(co: Co) -> None:
    """CreateVolume: mutable_parameters are accepted, and the same request returns the same volume; an unknown
    key is INVALID_ARGUMENT, and nothing is created.
    """
    request = co.create_request()
    request.mutable_parameters.update(co.options.parameters.mutable_parameters)
    request.mutable_parameters[_UNKNOWN] = "1"
    code, message = co.outcome(co.controller.CreateVolume, request)
    with co.beyond():
        assert code is Code.INVALID_ARGUMENT, f"{code.name}: {message}"
    if code is Code.OK:  # with a key that the driver ignores, or knows
        request.name = co.name()
    del request.mutable_parameters[_UNKNOWN]
    volume = co.create(request)
    again = co.ask(co.controller.CreateVolume, request).volume
    assert again.volume_id == volume.volume_id


@case(184, CREATE, MODIFY, _GIVEN)
@beyond("Kubernetes", "external-resizer adds its own keys to mutable_parameters")
def test_modify_accepts_keys_of_sidecars(co: Co) -> None:
    """ControllerModifyVolume: the keys csi.storage.k8s.io/… of external-resizer are accepted."""
    request = _modify(co, co.volume())
    request.mutable_parameters["csi.storage.k8s.io/pvc/name"] = "claim"
    request.mutable_parameters["csi.storage.k8s.io/pvc/namespace"] = "default"
    request.mutable_parameters["csi.storage.k8s.io/pv/name"] = "pv"
    co.ask(co.controller.ControllerModifyVolume, request)


@case(185, CREATE, MODIFY, NODE, _GIVEN)
@beyond(
    "ControllerModifyVolume",
    "MAY be called during the lifetime of a volume; whether also in use is left open",
)
def test_a_volume_in_use_is_modified(co: Co) -> None:
    """ControllerModifyVolume: OK while the volume is published; its data and its mount stay."""
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", b"kept")
    co.ask(co.controller.ControllerModifyVolume, _modify(co, volume))
    assert co.host.read(target / "file", 99) == b"kept"
    assert co.host.mounts_at(target) == 1


@case(186, CREATE, MODIFY, _GIVEN)
@must("ControllerModifyVolume", "this operation MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_identical_modifies_succeed(co: Co) -> None:
    """Concurrency: equal ControllerModifyVolume calls at once are OK or ABORTED, and OK when sent again."""
    request = _modify(co, co.volume())
    call = co.controller.ControllerModifyVolume
    _none_failed(co, co.concurrently([(call, request)] * _CALLERS))
    co.until_final(call, request)


@case(187, CREATE, MODIFY, EXPAND, _GIVEN)
@must("ControllerModifyVolume, ControllerExpandVolume", "these operations MUST be idempotent")
@should(
    "Concurrency",
    "the plugin SHOULD handle concurrent calls as gracefully as possible, and MAY return ABORTED",
)
def test_concurrent_modify_and_expansion_both_succeed(co: Co) -> None:
    """Concurrency: ControllerModifyVolume beside ControllerExpandVolume: each is OK or ABORTED, and OK when
    sent again; the volume has the size.
    """
    volume = co.volume()
    size = 2 * (volume.capacity_bytes or co.options.parameters.size_bytes)
    modify = _modify(co, volume)
    expand = csi_pb2.ControllerExpandVolumeRequest(
        volume_id=volume.volume_id,
        capacity_range=csi_pb2.CapacityRange(required_bytes=size),
        volume_capability=co.mount,
        secrets=co.options.parameters.secrets,
    )
    calls: list[Any] = [
        (co.controller.ControllerModifyVolume, modify),
        (co.controller.ControllerExpandVolume, expand),
    ]
    _none_failed(co, co.concurrently(calls))
    co.until_final(co.controller.ControllerModifyVolume, modify)
    assert co.until_final(co.controller.ControllerExpandVolume, expand).capacity_bytes >= size


def _modify(co: Co, volume: csi_pb2.Volume) -> csi_pb2.ControllerModifyVolumeRequest:
    return csi_pb2.ControllerModifyVolumeRequest(
        volume_id=volume.volume_id,
        mutable_parameters=co.options.parameters.mutable_parameters,
        secrets=co.options.parameters.secrets,
    )


def _none_failed(co: Co, answers: list[Any]) -> None:
    failed = {each.name for each in answers if isinstance(each, grpc.StatusCode)}
    with co.should():
        assert failed <= {Code.ABORTED.name}, f"{failed} for one of several calls at once"
