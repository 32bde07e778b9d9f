"""Claims as an author of a runtime meets them, without a device; the contract of HandlerRegistry, real and fake."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff.record import UnreadableHandoffRecord
from crust.handoff.store import Store
from crust.proxy.handlers import HandlerRegistry, Handlers
from crust.rpc import channel
from crust.rpc.serving import server
from crust.rpc.serving.service import Service, methods_of
from crust.runtime_handler import (
    Claim,
    ClaimedSince,
    NotDeferred,
    Resolved,
    State,
    process_of,
    reclaim_volume,
    registration,
    resolve_source,
    service,
    take_claim,
    testing,
)
from crust.wire.v1 import handlers_pb2, handlers_pb2_grpc, types_pb2
from tests.support.faults.refusals import refused
from tests.support.nodes.places import Places
from tests.support.nodes.tables import Bench
from tests.support.raised import raised
from tests.support.records.records import TARGET, a_record

Feature = volumes.HandlerFeature


@pytest.mark.parametrize(
    ("mount", "feature"),
    [
        ({"readonly": True}, Feature.READ_ONLY),
        ({"group": volumes.GroupChange(7)}, Feature.GROUP),
        ({"io_limits": volumes.IoLimits(read_iops=1)}, Feature.IO_LIMITS),
        ({"format": volumes.GuestFormat()}, Feature.FORMAT),
        ({"encryption": volumes.Encryption.LUKS}, Feature.LUKS),
    ],
)
@pytest.mark.spec("H-36", "H-38")
def test_missing_feature_refuses_the_volume(mount: dict[str, Any], feature: Feature) -> None:
    plain = a_record()
    record = plain.but(replace(plain.mount, group=None, readonly=False))
    take_claim.check_offered(record, frozenset())
    record = record.but(replace(record.mount, **mount))
    with raised("UnsupportedByHandler", match=f"does not offer {feature.name}"):
        take_claim.check_offered(record, frozenset(Feature) - {feature})
    take_claim.check_offered(record, {feature})


def test_group_of_read_only_volume_needs_no_feature_group() -> None:
    plain = a_record()
    mount = replace(plain.mount, group=volumes.GroupChange(7), readonly=True)
    take_claim.check_offered(plain.but(mount), {Feature.READ_ONLY})


def test_sub_path_is_refused_by_runtime_that_mounts_whole_volumes() -> None:
    assert Resolved(a_record(), "").require_whole() == a_record()
    with raised("SubPathUnsupported", match="a/b"):
        Resolved(a_record(), "a/b").require_whole()


def _claim(store: Store) -> Claim:
    paths = layout.Layout(store.root).entry(TARGET)
    lock = claims.ClaimLock.acquire(paths, TARGET)
    lock.settle()
    return Claim(paths, a_record(), volumes.SandboxId("box"), lock=lock)


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/volumes")
    made.open()
    return made


@pytest.fixture
def store(empty: Store) -> Store:
    empty.write(a_record())
    return empty


def _left(store: Store) -> claims.Claim | None:
    entry = store.read(TARGET)
    assert entry is not None
    return entry.claim


@pytest.mark.spec("H-29")
@pytest.mark.parametrize("handed_over", [False, True])
def test_release_with_error_leaves_its_reason(store: Store, *, handed_over: bool) -> None:
    claim = _claim(store)
    if handed_over:
        claim.close()
    claim.release(error="the kernel has no xfs")
    left = _left(store)
    assert left is not None
    assert (left.state, left.error, left.live) == (State.ERROR, "the kernel has no xfs", False)
    _claim(store).release()  # the next claim removes it
    assert _left(store) is None


def test_release_without_space_for_its_reason_gives_volume_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hypervisor runs on: what claim.json said before would refuse every other sandbox."""
    paths = layout.Layout(store.root).entry(TARGET)
    lock, sandbox = claims.ClaimLock.acquire(paths, TARGET), volumes.SandboxId("box")
    claim = Claim(paths, a_record(), sandbox, lock=lock, process=process_of(os.getpid()))
    claim.report(State.CLAIMED)

    def full(*_: object) -> None:
        raise errors.Exhausted("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(claims, "write", full)
        with pytest.raises(errors.Exhausted):
            claim.release(error="the kernel has no xfs")
    assert _left(store) is None
    with claims.ClaimLock.acquire(paths, TARGET) as next_lock:
        next_lock.check_ended(TARGET)


def test_failing_block_leaves_error_without_foreign_text(store: Store) -> None:
    for error, reason in [
        (errors.NotReady("too slow"), "too slow"),
        (ValueError("pw"), "ValueError"),
    ]:
        with contextlib.suppress(type(error)), _claim(store):
            raise error
        left = _left(store)
        assert left is not None
        assert reason in left.error
        assert "pw" not in left.error


async def test_handler_that_overrides_nothing_offers_nothing() -> None:
    base = service.Handler()
    for call in (
        base.get_stats(TARGET),
        base.expand(TARGET, volumes.CapacityRange(1, 0)),
        base.health(TARGET),
        base.freeze(TARGET, 1),
        base.thaw(TARGET),
        base.set_limits(TARGET, volumes.IoLimits()),
    ):
        with pytest.raises(service.FeatureNotOffered):
            await call


@pytest.fixture
def run_dir(short_dir: Path) -> str:
    return str(short_dir)


async def test_refused_registration_raises_one_error_and_logs_its_sentence(
    run_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    where, words = f"{run_dir}/handlers.sock", "filesystems is empty"
    request = registration.RegisterRequest(
        volumes.HandlerName("box"), "1", "/run/box.sock", frozenset()
    )
    async with testing.serving(run_dir):
        with caplog.at_level(logging.WARNING), pytest.raises(errors.InvalidRequest, match=words):
            async with registration.registered(where, request):
                await asyncio.Event().wait()
    (line,) = [
        record.getMessage() for record in caplog.records if "not registered" in record.getMessage()
    ]
    assert where in line
    assert "box" in line
    assert words in line


NEVER_OPEN = 10**6
DEEP = "/".join(["d" * 200] * 25)


class ObservedLock(claims.ClaimLock):
    """Notes whether the device is open when the lock is closed."""

    device_fd = -1
    closed_before: bool | None = None

    def close(self) -> None:
        if self.fd >= 0:
            self.closed_before = not os.path.exists(f"/proc/self/fd/{self.device_fd}")
        super().close()


@pytest.mark.parametrize("end", [Claim.close, Claim.release])
def test_device_is_closed_before_its_lock(tmp_path: Path, end: Callable[[Claim], None]) -> None:
    paths = layout.Layout(str(tmp_path)).entry(TARGET)
    lock = ObservedLock(os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT), paths)
    lock.device_fd = os.open(tmp_path / "device", os.O_RDWR | os.O_CREAT)
    sandbox = volumes.SandboxId("sandbox-1")
    claim = Claim(paths, a_record(), sandbox, lock=lock, device_fd=lock.device_fd)
    end(claim)
    assert lock.closed_before is True
    assert (lock.fd, claim.fds) == (-1, ())


def test_lock_is_closed_though_the_device_is_not(tmp_path: Path) -> None:
    lock = ObservedLock(
        os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT),
        layout.Layout(str(tmp_path)).entry(TARGET),
    )
    sandbox = volumes.SandboxId("sandbox-1")
    claim = Claim(lock.paths, a_record(), sandbox, lock=lock, device_fd=NEVER_OPEN)
    with pytest.raises(OSError, match="Bad file descriptor"):
        claim.close()
    assert lock.fd == -1


@pytest.mark.spec("H-46")
def test_claim_of_another_handlers_sandbox_is_not_reclaimed(store: Store) -> None:
    """Two runtimes may give their sandboxes the same id."""
    record, paths = a_record(), store.layout.entry(TARGET)
    dead = claims.Claim(
        "sandbox-1", "other", claims.State.MOUNTED, "", 1, record.crust.published_at, live=False
    )
    claims.write(paths, dead)
    with pytest.raises(ClaimedSince, match="sandbox-1"):
        reclaim_volume(
            store.root,
            TARGET,
            volumes.SandboxId("sandbox-1"),
            record.handler,
            process_of(os.getpid()),
        )
    assert claims.read(paths) == dead


@pytest.mark.parametrize(
    ("below", "sub_path"),
    [
        ("", ""),
        *((f"/{name}", name) for name in ("a", "a/b", "mount", "with space/ü", "x" * 200)),
        ("//a/./b/../c/", "a/c"),
        pytest.param(f"/{DEEP}", DEEP, id="too long for a target"),
    ],
)
def test_path_below_target_is_sub_path_of_the_volume(
    store: Store, below: str, sub_path: str
) -> None:
    assert resolve_source(store.root, f"{TARGET.text}{below}") == Resolved(a_record(), sub_path)
    assert len(DEEP) > volumes.PATH_MAX_BYTES


@pytest.mark.parametrize(
    "source",
    [
        *("tmpfs", "proc", "shm", "", "/", "/dev", "/nowhere/at/all", "/" + "a" * 300),
        *(f"{TARGET.text}-2", f"{TARGET.text}/../other", os.path.dirname(TARGET.text)),
    ],
)
def test_source_that_is_not_a_deferred_volume_is_not_deferred(store: Store, source: str) -> None:
    assert resolve_source(store.root, source) == NotDeferred(source)
    assert resolve_source(f"{store.root}/none", TARGET.text) == NotDeferred(TARGET.text)
    with pytest.raises(errors.InvalidRequest, match="NUL"):
        resolve_source(store.root, f"{source}/a\0b")


@pytest.mark.spec("H-32")
def test_longest_target_wins(empty: Store) -> None:
    outer, inner = a_record("/pods/a"), a_record("/pods/a/inner")
    empty.write(outer)
    empty.write(inner)
    assert resolve_source(empty.root, "/pods/a/inner/x") == Resolved(inner, "x")
    assert resolve_source(empty.root, "/pods/a/x") == Resolved(outer, "x")


def test_source_behind_a_link_finds_the_real_volume(empty: Store, tmp_path: Path) -> None:
    real = tmp_path / "data" / "kubelet" / "mount"
    real.mkdir(parents=True)
    (tmp_path / "kubelet").symlink_to(tmp_path / "data" / "kubelet")
    empty.write(a_record(f"{real}"))
    resolved = resolve_source(empty.root, f"{tmp_path}/kubelet/mount/sub")
    assert resolved == Resolved(a_record(f"{real}"), "sub")


@pytest.mark.parametrize("sub_path", ["", "/sub"])
def test_unreadable_record_is_no_ordinary_mount(store: Store, sub_path: str) -> None:
    Path(store.layout.entry(TARGET).record).write_text("{}")
    with pytest.raises(UnreadableHandoffRecord):
        resolve_source(store.root, f"{TARGET.text}{sub_path}")


def test_claiming_and_resolving_import_no_grpc() -> None:
    program = (
        "import sys, crust.runtime_handler.keepers\n"
        "sys.exit(any(m.partition('.')[0] == 'grpc' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


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
        ({"endpoint": "relative.sock"}, "not absolute"),
        ({"endpoint": "/" + "x" * 107}, "107"),
        ({"endpoint": "/run/h.sock\0x"}, "control character"),
        ({"volume_types": []}, "BLOCK"),
        ({"filesystems": []}, "filesystems is empty"),
        ({"filesystems": ["ext4"] * 65}, "65 filesystems, and 64 is the most"),
        ({"filesystems": ["ext4", "../x"]}, "'../x'"),
        ({"max_volumes_per_sandbox": -1}, "max_volumes_per_sandbox"),
        ({"max_target_path_bytes": -1}, "max_target_path_bytes"),
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
