"""Volumes that a wrapped driver creates: what it is asked, and what the sidecars get."""

from collections.abc import Mapping
from typing import Any

import grpc
import pytest

from crust.wire.csi.v1 import csi_pb2
from tests.support.co import capability, create_request
from tests.support.drivers.vendor_controller import Served
from tests.support.faults.refusals import refused

Code = grpc.StatusCode
MODE = csi_pb2.VolumeCapability.AccessMode
ALWAYS = {"crust.dev/defer": "always"}
BY_CLASS = {"crust.dev/defer": "runtime-class"}


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


@pytest.mark.parametrize(
    "keys", [{"crust.dev/encryption": "luks"}, {"crust.dev/runtime-handler": "kata"}]
)
async def test_class_with_keys_leaves_its_choice_to_the_proxy(
    shim: Served, keys: dict[str, str]
) -> None:
    answer = await shim.stub.CreateVolume(creation(keys))
    assert dict(answer.volume.volume_context) == {**keys, "crust.dev/created-empty": "true"}
    assert shim.driver.last.volume_capabilities[0].HasField("mount")
