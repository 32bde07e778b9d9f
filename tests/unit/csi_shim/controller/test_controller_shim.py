"""The shim beside a controller: what the driver is asked, and what the sidecars get."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from crust.core import errors
from crust.csi_shim import shim_process
from crust.csi_shim.controller import controller_shim
from crust.csi_shim.settings import DetachAccess, ShimSettings
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.co import capability, create_request
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure, FakeDriver
from tests.support.faults.refusals import refused
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes, recorded
from tests.support.raised import raised

Code = grpc.StatusCode
MODE = csi_pb2.VolumeCapability.AccessMode
ALWAYS = {"crust.dev/defer": "always"}
BY_CLASS = {"crust.dev/defer": "runtime-class"}
KNOWN = {"type", "blocksize", "bytesPerInode", "fromBackup"}


class Controller(FakeDriver):
    """A vendor's controller: it remembers each request, and refuses parameters that it does not know."""

    def __init__(self) -> None:
        super().__init__("1.13", twist=self._answered)
        self.name = "csi.example.com"
        self.requests: list[Any] = []
        self.context: dict[str, str] = {}
        self.source = False

    def _answered(self, method: str, request: Any, answer: Any) -> Any:
        """Of any volume; what the fake driver itself answers is of volumes that it has made."""
        if method.startswith("Get") and method != "GetCapacity":
            return answer
        self.requests.append(request)
        unknown = set(getattr(request, "parameters", ())) - KNOWN
        if unknown and method in ("CreateVolume", "GetCapacity"):
            return Failure(Code.INVALID_ARGUMENT, f"Invalid parameter key {unknown}")
        return getattr(self, f"_{method}", lambda _: getattr(csi_pb2, f"{method}Response")())(
            request
        )

    def _CreateVolume(self, _: Any) -> Any:
        volume = csi_pb2.Volume(
            volume_id="vol-1", capacity_bytes=1 << 30, volume_context=self.context
        )
        if self.source:
            volume.content_source.volume.volume_id = "vol-0"
        return csi_pb2.CreateVolumeResponse(volume=volume)

    def _ValidateVolumeCapabilities(self, request: Any) -> Any:
        answer = csi_pb2.ValidateVolumeCapabilitiesResponse()
        answer.confirmed.volume_capabilities.extend(request.volume_capabilities)
        answer.confirmed.volume_context.update(request.volume_context)
        return answer

    def _GetCapacity(self, _: Any) -> Any:
        return csi_pb2.GetCapacityResponse(available_capacity=7 << 30)

    @property
    def last(self) -> Any:
        return self.requests[-1]


@dataclass
class Served:
    """The controller, and a sidecar's stub of the shim before it."""

    driver: Controller
    stub: Any


async def serve(**access: Any) -> AsyncIterator[Served]:
    driver = Controller()
    with tempfile.TemporaryDirectory(prefix="crust-") as root:
        settings = ShimSettings(
            socket=f"{root}/csi.sock",
            driver_socket=f"{root}/driver.sock",
            controller=True,
            **{"check_detach": False, **access},
        )
        async with (
            fake_driver.serving(driver, settings.driver_socket),
            shim_process.serving(settings),
            channel.connect(settings.socket) as connected,
        ):
            yield Served(driver, csi_pb2_grpc.ControllerStub(connected))


@pytest_asyncio.fixture
async def shim() -> AsyncIterator[Served]:
    async for served in serve():
        yield served


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


def creation(
    parameters: Mapping[str, str], *capabilities: csi_pb2.VolumeCapability, **fields: Any
) -> csi_pb2.CreateVolumeRequest:
    return create_request("pvc-1", *capabilities, parameters=parameters, **fields)


async def test_strict_driver_gets_no_key_and_the_answer_has_them(shim: Served) -> None:
    keys = {**ALWAYS, "crust.dev/runtime-handler": "kata", "crust.dev/ext4-reserved-percent": "1"}
    shim.driver.context = {"vendor": "kept"}
    answer = await shim.stub.CreateVolume(creation({"type": "ssd", **keys}))
    assert dict(shim.driver.last.parameters) == {"type": "ssd"}
    made = {"vendor": "kept", **keys, "crust.dev/created-empty": "true"}
    assert dict(answer.volume.volume_context) == made


@pytest.mark.parametrize(
    ("keys", "is_block"), [(ALWAYS, True), (BY_CLASS, False), ({"crust.dev/defer": "never"}, False)]
)
async def test_volume_is_created_as_block_if_always_deferred(
    shim: Served, keys: dict[str, str], *, is_block: bool
) -> None:
    mode = MODE.SINGLE_NODE_SINGLE_WRITER
    await shim.stub.CreateVolume(creation(keys, capability(mode=mode)))
    (made,) = shim.driver.last.volume_capabilities
    assert made == (capability(mode=mode, block=True) if is_block else capability(mode=mode))


@pytest.mark.parametrize("parameters", [{}, {"type": "ssd"}])
async def test_volume_of_a_silent_class_is_never_deferred(
    shim: Served, parameters: dict[str, str]
) -> None:
    """The driver creates it for the host: no default of a node defers it, and its detach by force is not checked."""
    many = capability(mode=MODE.MULTI_NODE_MULTI_WRITER)
    request = creation(parameters, many)
    request.MergeFromString(b"\xca\x3e\x03new")  # a field of a later CSI
    answer = await shim.stub.CreateVolume(request)
    assert shim.driver.last.SerializeToString() == request.SerializeToString()
    assert dict(answer.volume.volume_context) == {"crust.dev/defer": "never"}


@pytest.mark.parametrize("keys", [ALWAYS, BY_CLASS])
@pytest.mark.parametrize(
    ("mounted", "words"),
    [
        (capability(mode=MODE.MULTI_NODE_MULTI_WRITER), "MULTI_NODE_MULTI_WRITER"),
        (capability("nfs4"), "nfs4"),
    ],
)
async def test_mount_of_several_writers_or_from_no_device_is_refused(
    shim: Served, keys: dict[str, str], mounted: csi_pb2.VolumeCapability, words: str
) -> None:
    create = shim.stub.CreateVolume(creation(keys, mounted))
    await refused(create, Code.INVALID_ARGUMENT, words)
    assert shim.driver.requests == []


async def test_raw_block_volume_of_several_writers_is_the_drivers_business(shim: Served) -> None:
    raw = capability(mode=MODE.MULTI_NODE_MULTI_WRITER, block=True)
    await shim.stub.CreateVolume(creation(ALWAYS, raw))
    assert list(shim.driver.last.volume_capabilities) == [raw]


@pytest.mark.parametrize("filled_by", ["source", "answer", "parameter"])
async def test_volume_with_content_is_not_created_empty(shim: Served, filled_by: str) -> None:
    parameters = {**ALWAYS, "fromBackup": "s3://x"} if filled_by == "parameter" else ALWAYS
    request = creation(parameters, snapshot="snap-1" if filled_by == "source" else "")
    shim.driver.source = filled_by == "answer"
    answer = await shim.stub.CreateVolume(request)
    assert "crust.dev/created-empty" not in answer.volume.volume_context


async def test_vendors_mkfs_option_becomes_crusts_or_is_refused_by_name(shim: Served) -> None:
    answer = await shim.stub.CreateVolume(creation({**ALWAYS, "bytesPerInode": "65536"}))
    assert dict(shim.driver.last.parameters) == {}
    assert answer.volume.volume_context["crust.dev/ext4-bytes-per-inode"] == "65536"
    shim.driver.requests.clear()
    other = creation({**ALWAYS, "blocksize": "1024"})
    await refused(shim.stub.CreateVolume(other), Code.INVALID_ARGUMENT, "blocksize")
    assert shim.driver.requests == []


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"crust.dev/defer": "sometimes"}, "always, never, runtime-class"),
        ({**ALWAYS, "crust.dev/created-empty": "true"}, "crust.dev/created-empty"),
        ({**ALWAYS, "crust.dev/defre": "x"}, "crust.dev/defre"),
        ({**ALWAYS, "crust.dev/ext4-bytes-per-inode": "12"}, "4096"),
        ({**ALWAYS, "bytesPerInode": "many"}, "decimal"),
        ({**ALWAYS, "encryptionType": "file"}, "encryptionType"),
        ({**ALWAYS, "data-cache-size": "50Gi"}, "data-cache-size"),
    ],
)
async def test_invalid_parameter_is_refused_before_driver_is_called(
    shim: Served, parameters: dict[str, str], words: str
) -> None:
    await refused(shim.stub.CreateVolume(creation(parameters)), Code.INVALID_ARGUMENT, words)
    assert shim.driver.requests == []


async def test_drivers_status_is_passed_unchanged(shim: Served) -> None:
    request = creation({**ALWAYS, "other": "1"})
    await refused(shim.stub.CreateVolume(request), Code.INVALID_ARGUMENT, "Invalid parameter key")


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


@pytest.mark.parametrize(
    "keys", [{"crust.dev/encryption": "luks"}, {"crust.dev/runtime-handler": "kata"}]
)
async def test_class_with_keys_leaves_its_choice_to_the_proxy(
    shim: Served, keys: dict[str, str]
) -> None:
    answer = await shim.stub.CreateVolume(creation(keys))
    assert dict(answer.volume.volume_context) == {**keys, "crust.dev/created-empty": "true"}
    assert shim.driver.last.volume_capabilities[0].HasField("mount")


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
