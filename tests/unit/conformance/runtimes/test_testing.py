"""The contract of HandlerRegistry, of the proxy and of the test kit."""

import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.proxy.handlers import HandlerRegistry, Handlers
from crust.rpc import channel
from crust.rpc.serving import server
from crust.rpc.serving.service import Service, methods_of
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc, types_pb2
from crust_conformance.runtimes import testing
from tests.support.faults.refusals import refused
from tests.support.nodes.places import Places
from tests.support.nodes.tables import Bench

Code = grpc.StatusCode


@pytest.fixture(params=["proxy", "test kit"])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A stub of the registry; its handoff directory is `volumes` below the socket's directory."""
    async with AsyncExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="crust-"))
        if request.param == "proxy":
            served = HandlerRegistry(Handlers(grace_s=0), Bench.make(Places(root)).entries)
            methods = methods_of(
                served, handlers_pb2.DESCRIPTOR.services_by_name["HandlerRegistry"]
            )
            serving = server.serving(f"{root}/handlers.sock", Service("test", methods))
            await stack.enter_async_context(serving)
            stack.callback(served.stop)
        else:
            await stack.enter_async_context(testing.serving(root))
        connected = await stack.enter_async_context(channel.connect(f"{root}/handlers.sock"))
        yield handlers_pb2_grpc.HandlerRegistryStub(connected)


@pytest.fixture(autouse=True)
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Listen at the endpoint of the requests: the proxy looks at the process there."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "box.sock"))
        listener.listen()
        monkeypatch.setitem(SERVED, "endpoint", str(tmp_path / "box.sock"))
        yield


SERVED = {"endpoint": ""}
"""The endpoint at which this process listens during a test."""


def _request(**changes: Any) -> handlers_pb2.RegisterRequest:
    fields = {
        "name": "box",
        "version": "1",
        **SERVED,
        "volume_types": [types_pb2.VolumeType.BLOCK],
        "filesystems": ["ext4"],
        **changes,
    }
    return handlers_pb2.RegisterRequest(**fields)


async def test_session_gets_the_directory_and_ends_with_its_stream(registry: Any) -> None:
    first = registry.Register(_request(), timeout=20)
    answer = await first.read()
    assert answer.volumes_directory.endswith("/volumes")
    assert answer.proxy_version
    again = registry.Register(_request(), timeout=20).read()
    await refused(again, Code.ALREADY_EXISTS, "'box'", SERVED["endpoint"], "another name")
    other = registry.Register(_request(name="other"), timeout=20)
    assert (await other.read()).volumes_directory == answer.volumes_directory
    first.cancel()
    other.cancel()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "name"),
        ({"name": "Not A Name"}, "'Not A Name'"),
        ({"name": "x" * 64}, "name"),
        ({"name": "box\n"}, "name"),
        ({"name": 'box"'}, "name"),
        ({"name": "b\u043ex"}, "name"),  # a Cyrillic letter
        ({"name": "../box"}, "'../box'"),
        ({"name": "-box"}, "'-box'"),
        ({"name": "box\x1b[2J"}, "name"),
        ({"endpoint": "relative.sock"}, "not absolute"),
        ({"endpoint": "/" + "x" * 107}, "107"),
        ({"endpoint": "/run/h.sock\0x"}, "control character"),
        ({"volume_types": []}, "BLOCK"),
        ({"filesystems": []}, "filesystems is empty"),
        ({"filesystems": ["ext4"] * 65}, "65 filesystems, and 64 is the most"),
        ({"filesystems": ["ext4"] * 100_000}, "100000 filesystems, and 64 is the most"),
        ({"filesystems": ["ext4", "../x"]}, "'../x'"),
        ({"filesystems": ["ext4,ro"]}, "'ext4,ro'"),
        ({"filesystems": ["x" * 100_000]}, "'" + "x" * 32 + "'"),
        ({"max_volumes_per_sandbox": -1}, "max_volumes_per_sandbox"),
        ({"max_target_path_bytes": -1}, "max_target_path_bytes"),
        ({"guest_kernel": "new"}, "guest_kernel is 'new'"),
        ({"guest_kernel": "6.1\n"}, "guest_kernel"),
        ({"guest_kernel": "6.1" + "x" * 62}, "guest_kernel"),
    ],
)
async def test_invalid_request_is_refused(
    registry: Any, changes: dict[str, Any], words: str
) -> None:
    call = registry.Register(_request(**changes), timeout=20)
    await refused(call.read(), Code.INVALID_ARGUMENT, "cannot be registered", words)
    call = registry.Register(_request(), timeout=20)  # nobody has the name
    assert (await call.read()).volumes_directory
    call.cancel()


async def test_unknown_feature_is_accepted(registry: Any) -> None:
    call = registry.Register(_request(features=[1, 4711]), timeout=20)
    assert (await call.read()).volumes_directory
    call.cancel()


async def test_secrets_of_unpublished_target_are_not_found(registry: Any) -> None:
    asked = handlers_pb2.GetVolumeSecretsRequest(target_path="/nowhere", handler="box")
    await refused(registry.GetVolumeSecrets(asked, timeout=20), Code.NOT_FOUND)
