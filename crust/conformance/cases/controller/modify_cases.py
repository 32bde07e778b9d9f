"""Mutable parameters, from CreateVolume to a modify that does not come alone (C-181 to C-187).

CSI has no call that returns a volume's mutable parameters, so these cases check answers and not effects.
"""

from typing import Any

import grpc

from crust.conformance.options import UNKNOWN_VOLUME
from crust.conformance.orchestrator import expansion
from crust.conformance.orchestrator.calls import Code
from crust.conformance.orchestrator.co import Co
from crust.wire.csi.v1 import csi_pb2

_CALLERS = 6
_UNKNOWN = "crust-conformance-unknown"


def test_c181_modify_needs_a_volume(co: Co) -> None:
    request = csi_pb2.ControllerModifyVolumeRequest
    parameters = co.options.parameters.mutable_parameters or {"crust-conformance": "1"}
    co.refused(request(mutable_parameters=parameters), Code.INVALID_ARGUMENT)
    if co.options.parameters.mutable_parameters:
        unknown = request(volume_id=UNKNOWN_VOLUME, mutable_parameters=parameters)
        co.refused(unknown, Code.NOT_FOUND)


def test_c182_modify_is_idempotent_and_refuses_unknown_keys(co: Co) -> None:
    volume = co.volume()
    request = _modify(co, volume)
    co.ask(request)
    co.ask(request)
    request.mutable_parameters[_UNKNOWN] = "1"
    co.refused(request, Code.INVALID_ARGUMENT)


def test_c183_a_volume_is_made_with_mutable_parameters(co: Co) -> None:
    request = co.create_request()
    request.mutable_parameters.update(co.options.parameters.mutable_parameters)
    request.mutable_parameters[_UNKNOWN] = "1"
    code, message = co.outcome(request)
    with co.beyond():
        assert code is Code.INVALID_ARGUMENT, f"{code.name}: {message}"
    if code is Code.OK:  # with a key that the driver ignores, or knows
        request.name = co.name()
    del request.mutable_parameters[_UNKNOWN]
    volume = co.create(request)
    again = co.ask(request).volume
    assert again.volume_id == volume.volume_id


def test_c184_modify_accepts_keys_of_sidecars(co: Co) -> None:
    request = _modify(co, co.volume())
    request.mutable_parameters["csi.storage.k8s.io/pvc/name"] = "claim"
    request.mutable_parameters["csi.storage.k8s.io/pvc/namespace"] = "default"
    request.mutable_parameters["csi.storage.k8s.io/pv/name"] = "pv"
    co.ask(request)


def test_c185_a_volume_in_use_is_modified(co: Co) -> None:
    volume = co.volume()
    target = co.use(volume)
    co.host.write(target / "file", b"kept")
    co.ask(_modify(co, volume))
    assert co.host.read(target / "file", 99) == b"kept"
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
        secrets=co.options.parameters.secrets,
    )


def _none_failed(co: Co, answers: list[Any]) -> None:
    failed = {each.name for each in answers if isinstance(each, grpc.StatusCode)}
    with co.should():
        assert failed <= {Code.ABORTED.name}, f"{failed} for one of several calls at once"
