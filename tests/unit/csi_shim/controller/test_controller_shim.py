"""The shim beside a controller: attach, detach, validation, expansion and capacity."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from crust.core import errors
from crust.csi_shim.controller import controller_shim
from crust.csi_shim.settings import DetachAccess, ShimSettings
from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability
from tests.support.drivers.vendor_controller import Served, serve
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes, recorded
from tests.support.raised import raised

MODE = csi_pb2.VolumeCapability.AccessMode
ALWAYS = {"crust.dev/defer": "always"}
BY_CLASS = {"crust.dev/defer": "runtime-class"}


@pytest.fixture
def api() -> FakeKubernetes:
    """A cluster in which node "worker-1" uses volume "vol-1", and no driver is registered there any more."""
    made = FakeKubernetes()
    volume = recorded("pv-csi")
    volume["spec"]["csi"]["driver"] = "csi.example.com"
    made.add(volume, "persistentvolumes")
    attachment = recorded("volumeattachment-attached")
    attachment["spec"]["attacher"] = "csi.example.com"
    made.add(attachment, "volumeattachments")
    node = recorded("node-in-use-not-ready")
    node["status"]["volumesInUse"] = ["kubernetes.io/csi/csi.example.com^vol-1"]
    made.add(node, "nodes")
    return made


@pytest_asyncio.fixture
async def with_api(api: FakeKubernetes, tmp_path: Path) -> AsyncIterator[Served]:
    """The shim with access to that cluster."""
    with fake_kubernetes.serving(api, tmp_path) as kubeconfig:
        access = {"check_detach": True, "kubernetes": DetachAccess(kubeconfig=kubeconfig)}
        async for served in serve(**access):
            for collection in ("volumeattachments", "persistentvolumes", "csinodes"):
                await asyncio.to_thread(api.wait_for_watch, collection)
            yield served


def attach(context: Mapping[str, str], **fields: Any) -> csi_pb2.ControllerPublishVolumeRequest:
    return csi_pb2.ControllerPublishVolumeRequest(
        volume_id="vol-1",
        node_id="n",
        volume_capability=capability(),
        volume_context=context,
        **fields,
    )


async def test_attach_of_a_deferred_volume_is_of_its_created_kind(shim: Served) -> None:
    await shim.stub.ControllerPublishVolume(attach({"vendor": "kept", **ALWAYS}, readonly=True))
    assert dict(shim.driver.last.volume_context) == {"vendor": "kept"}
    assert shim.driver.last.volume_capability == capability(block=True)
    assert shim.driver.last.readonly  # some drivers attach the disk itself read-only
    await shim.stub.ControllerPublishVolume(attach({"vendor": "kept", **BY_CLASS}))
    assert dict(shim.driver.last.volume_context) == {"vendor": "kept"}
    assert shim.driver.last.volume_capability == capability()


@pytest.mark.parametrize(
    "given", [None, csi_pb2.VolumeCapability(access_mode=MODE(mode=MODE.SINGLE_NODE_WRITER))]
)
async def test_capability_that_is_missing_stays_missing_for_the_driver(
    shim: Served, given: csi_pb2.VolumeCapability | None
) -> None:
    """The driver refuses it, as it does without crust; nothing that the CO did not send makes it valid."""
    request = attach(ALWAYS)
    request.ClearField("volume_capability")
    if given is not None:
        request.volume_capability.CopyFrom(given)
    await shim.stub.ControllerPublishVolume(request)
    assert shim.driver.last.HasField("volume_capability") is (given is not None)
    assert shim.driver.last.volume_capability.WhichOneof("access_type") is None
    validation = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id="vol-1", volume_context=ALWAYS, volume_capabilities=[given] if given else []
    )
    await shim.stub.ValidateVolumeCapabilities(validation)
    assert shim.driver.last.volume_capabilities == validation.volume_capabilities


async def test_answer_confirms_exactly_the_requested_capabilities(shim: Served) -> None:
    request = csi_pb2.ValidateVolumeCapabilitiesRequest(
        volume_id="vol-1",
        volume_context={"vendor": "kept", **ALWAYS},
        parameters={"type": "ssd", **ALWAYS},
        volume_capabilities=[capability()],
    )
    answer = await shim.stub.ValidateVolumeCapabilities(request)
    assert list(shim.driver.last.volume_capabilities) == [capability(block=True)]
    assert dict(shim.driver.last.parameters) == {"type": "ssd"}
    assert answer.confirmed.volume_capabilities == request.volume_capabilities
    assert answer.confirmed.volume_context == request.volume_context
    assert answer.confirmed.parameters == request.parameters


@pytest.mark.parametrize("kind", ["mount", "block", "not said"])
async def test_expansion_asks_the_node_unless_the_volume_is_raw(shim: Served, kind: str) -> None:
    request = csi_pb2.ControllerExpandVolumeRequest(volume_id="vol-1")
    if kind != "not said":
        request.volume_capability.CopyFrom(capability(block=kind == "block"))
    answer = await shim.stub.ControllerExpandVolume(request)
    assert answer.node_expansion_required is (kind != "block")
    assert shim.driver.last.SerializeToString() == request.SerializeToString()


def detach(volume_id: str = "vol-1", node_id: str = "n") -> Any:
    return csi_pb2.ControllerUnpublishVolumeRequest(volume_id=volume_id, node_id=node_id)


async def detach_error(stub: Any, node_id: str = "n") -> str:
    """What external-attacher writes to VolumeAttachment.status.detachError, where an operator looks."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ControllerUnpublishVolume(detach(node_id=node_id))
    code = caught.value.code().name.title().replace("_", "")
    return f"rpc error: code = {code} desc = {caught.value.details()}"


@pytest.mark.parametrize("node_id", ["n", ""])
async def test_detach_from_a_node_that_uses_it_is_refused(with_api: Served, node_id: str) -> None:
    text = await detach_error(with_api.stub, node_id)
    assert text.startswith(
        "rpc error: code = FailedPrecondition desc = [UsedOnNode] volume vol-1 is not detached from node worker-1: "
        "the node reports it in use: a guest may write to it, even if its pod has ended; stop the guest on that node"
    )
    assert "node.kubernetes.io/out-of-service" in text
    assert with_api.driver.requests == []


async def test_detach_of_an_unused_volume_passes(with_api: Served, api: FakeKubernetes) -> None:
    api.add(recorded("node-out-of-service"), "nodes")
    await with_api.stub.ControllerUnpublishVolume(detach())
    assert with_api.driver.last == detach()


async def test_controller_needs_the_api_only_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    settings = ShimSettings(
        socket="/none/csi.sock", driver_socket="/none/driver.sock", controller=True
    )
    with raised("DetachNotChecked", errors.InvalidRequest, match="check_detach = false"):
        async with controller_shim.users_of(settings):
            pass
    unchecked = settings.model_copy(update={"check_detach": False})
    async with controller_shim.users_of(unchecked) as users:
        assert users is None


async def test_without_check_of_detaches_every_detach_passes(shim: Served) -> None:
    await shim.stub.ControllerUnpublishVolume(detach())
    assert shim.driver.last == detach()


@pytest.mark.parametrize(
    ("parameters", "kind"), [(ALWAYS, "block"), (BY_CLASS, "mount")], ids=["always", "by class"]
)
async def test_capacity_is_asked_for_kind_of_the_class_volumes(
    shim: Served, parameters: dict[str, str], kind: str
) -> None:
    """A sidecar asks with all parameters of the StorageClass, and its pods wait while a strict driver refuses one."""
    request = csi_pb2.GetCapacityRequest(
        parameters={**parameters, "type": "ssd"}, volume_capabilities=[capability()]
    )
    assert (await shim.stub.GetCapacity(request)).available_capacity == 7 << 30
    assert dict(shim.driver.last.parameters) == {"type": "ssd"}
    (asked,) = shim.driver.last.volume_capabilities
    assert asked.WhichOneof("access_type") == kind


async def test_call_for_volume_without_key_passes_byte_for_byte(shim: Served) -> None:
    capacity = csi_pb2.GetCapacityRequest(
        parameters={"type": "ssd"}, volume_capabilities=[capability()]
    )
    attachment = attach({"vendor": "kept"})
    for call, request in (
        (shim.stub.GetCapacity, capacity),
        (shim.stub.ControllerPublishVolume, attachment),
    ):
        await call(request)
        assert shim.driver.last.SerializeToString() == request.SerializeToString()
