"""crust.runtime_handler.registration against the proxy's own registry, over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from crust.core import errors, volumes
from crust.core.volumes import HandlerFeature
from crust.handoff.record import Record
from crust.handoff.store import Store
from crust.host.mounts import mount_api
from crust.proxy.handlers import HandlerRegistry, Handlers, RegisteredHandler
from crust.rpc.serving import server
from crust.rpc.serving.service import Service, methods_of
from crust.runtime_handler import registration
from crust.runtime_handler.blocking import NotDeferred, Resolved, resolve_source
from crust.runtime_handler.registration import RegisterRequest, Registration
from crust.wire.v1 import handlers_pb2
from tests.support.nodes.places import Places
from tests.support.nodes.tables import Bench
from tests.support.raised import raised
from tests.support.records.records import a_record

DEADLINE_S = 60.0


def _request(run_dir: str, **changes: str) -> RegisterRequest:
    request = RegisterRequest(
        name=volumes.HandlerName("kata"),
        version="1",
        endpoint=f"{run_dir}/handler.sock",
        filesystems=frozenset({"ext4", "xfs"}),
        features=frozenset({HandlerFeature.STATS, HandlerFeature.ONLINE_EXPAND}),
    )
    return replace(request, **changes)  # type: ignore[arg-type]


class WatchedHandlers(Handlers):
    """Signals the end of a session."""

    def __init__(self) -> None:
        super().__init__(grace_s=0)
        self.session_ended = asyncio.Event()

    @asynccontextmanager
    async def session(self, handler: RegisteredHandler) -> AsyncIterator[None]:
        """Keep the session, and signal its end."""
        try:
            async with super().session(handler):
                yield
        finally:
            self.session_ended.set()


class WatchedRegistration(Registration):
    """Signals a refusal by the proxy."""

    def __init__(self, proxy_socket: str, request: RegisterRequest) -> None:
        super().__init__(proxy_socket, request)
        self.refused = asyncio.Event()

    def _refused(self, error: errors.CrustError) -> None:
        super()._refused(error)
        self.refused.set()


@asynccontextmanager
async def _proxy(run_dir: str) -> AsyncIterator[WatchedHandlers]:
    handlers = WatchedHandlers()
    registry = HandlerRegistry(handlers, Bench.make(Places(run_dir)).entries)

    methods = methods_of(registry, handlers_pb2.DESCRIPTOR.services_by_name["HandlerRegistry"])
    async with server.serving(f"{run_dir}/proxy.sock", Service("test", methods)):
        try:
            yield handlers
        finally:
            registry.stop()


async def _wait(event: asyncio.Event) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await event.wait()


@asynccontextmanager
async def _registered(run_dir: str, request: RegisterRequest) -> AsyncIterator[Registration]:
    async with registration.Registration(f"{run_dir}/proxy.sock", request) as made:
        yield made


@contextmanager
def _served(*endpoints: str) -> Iterator[None]:
    """A process listens at the endpoints: the proxy looks for it."""
    with ExitStack() as listeners:
        for endpoint in endpoints:
            listener = listeners.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(endpoint)
            listener.listen()
        yield


async def test_taken_name_is_retried_until_it_is_free(run_dir: str) -> None:
    with _served(f"{run_dir}/handler.sock", f"{run_dir}/heir.sock"):
        async with _proxy(run_dir) as handlers, AsyncExitStack() as stack:
            first = await stack.enter_async_context(_registered(run_dir, _request(run_dir)))
            await _wait(first.registered)
            heir = _request(run_dir, endpoint=f"{run_dir}/heir.sock")
            second = WatchedRegistration(f"{run_dir}/proxy.sock", heir)
            task = asyncio.create_task(second.run())
            await _wait(second.refused)
            assert isinstance(second.error, errors.Conflict)
            assert not second.registered.is_set()
            await stack.aclose()
            await _wait(second.registered)
            assert [handler.endpoint for handler in handlers.all()] == [heir.endpoint]
            task.cancel()
            await asyncio.wait([task])


async def test_invalid_request_ends_the_registration(run_dir: str) -> None:
    async with _proxy(run_dir):
        made = Registration(f"{run_dir}/proxy.sock", _request(run_dir, name="Not A Name"))
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(errors.InvalidRequest, match="Not A Name"):
                await made.run()
        assert made.lost.is_set()


async def test_end_of_the_block_ends_the_session(run_dir: str) -> None:
    async with _proxy(run_dir) as handlers:
        with _served(f"{run_dir}/handler.sock"):
            async with _registered(run_dir, _request(run_dir)) as made:
                await _wait(made.registered)
        await _wait(handlers.session_ended)
        assert handlers.all() == ()
        assert not made.registered.is_set()


async def test_invalid_proxy_socket_path_is_refused_at_once(run_dir: str) -> None:
    made = Registration("relative.sock", _request(run_dir))
    with pytest.raises(errors.InvalidRequest):
        await made.run()


def test_the_features_are_those_of_the_contract() -> None:
    numbers = {
        name.removeprefix("HANDLER_FEATURE_"): number
        for name, number in handlers_pb2.HandlerFeature.items()
        if number
    }
    assert {feature.name: feature.value for feature in HandlerFeature} == numbers


pytestmark = pytest.mark.root


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Path]:
    """A kubelet's root with a guarded target in it, `mount`, and an empty `bind`; unmounted afterwards."""
    root = tmp_path / "data" / "kubelet"
    for name in ("mount", "bind", "other"):
        (root / name).mkdir(parents=True)
    mount_api.mount_guard(f"{root}/mount")
    yield root
    for name in ("bind", "mount", "other"):
        mount_api.unmount(f"{root}/{name}")


def _published(store: Store, target: str) -> Record:
    return store.write(a_record(volumes.TargetPath.parse(target))).require()


def test_link_to_the_root_leads_to_the_volume(store: Store, kubelet: Path, tmp_path: Path) -> None:
    (tmp_path / "kubelet").symlink_to(kubelet)
    record = _published(store, f"{tmp_path}/kubelet/mount")
    assert resolve_source(store.root, f"{kubelet}/mount") == Resolved(record, "")
    assert resolve_source(store.root, f"{kubelet}/mount/a/b") == Resolved(record, "a/b")


def test_a_bind_of_a_target_is_the_targets_volume(store: Store, kubelet: Path) -> None:
    _published(store, f"{kubelet}/elsewhere")
    record = _published(store, f"{kubelet}/mount")
    mount_api.bind(f"{kubelet}/mount", f"{kubelet}/bind")
    assert resolve_source(store.root, f"{kubelet}/bind") == Resolved(record, "")
    assert resolve_source(store.root, f"{kubelet}/bind/sub") == Resolved(record, "sub")


def test_bind_of_one_of_two_targets_is_its_own(store: Store, kubelet: Path) -> None:
    _published(store, f"{kubelet}/mount")
    mount_api.mount_guard(f"{kubelet}/other")
    other = _published(store, f"{kubelet}/other")
    mount_api.bind(f"{kubelet}/other", f"{kubelet}/bind")
    assert resolve_source(store.root, f"{kubelet}/bind") == Resolved(other, "")


@pytest.mark.parametrize("below", ["", "/sub"])
def test_guarded_target_without_entry_is_no_share(store: Store, kubelet: Path, below: str) -> None:
    _published(store, f"{kubelet}/other")
    with raised("GuardWithoutEntry", match="awaits a deferred volume"):
        resolve_source(store.root, f"{kubelet}/mount{below}")


def test_guarded_target_without_record_is_refused(store: Store, kubelet: Path) -> None:
    record = _published(store, f"{kubelet}/mount")
    Path(store.layout.entry(record.target).record).unlink()
    with raised("GuardWithoutEntry"):
        resolve_source(store.root, f"{kubelet}/mount")


def test_directory_beside_a_guarded_one_is_an_ordinary_mount(store: Store, kubelet: Path) -> None:
    _published(store, f"{kubelet}/mount")
    assert resolve_source(store.root, f"{kubelet}/bind") == NotDeferred(f"{kubelet}/bind")
