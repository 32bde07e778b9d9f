"""What an author of a runtime meets without a device: needs, reasons of a release, defaults, refusals."""

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from crust.core import errors, volumes
from crust.handoff import claims, layout
from crust.handoff.store import Store
from crust.runtime_handler import Claim, Resolved, State, needs, registration, service
from crust.wire.v1 import handlers_pb2_grpc
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
def test_volume_that_needs_a_feature_is_refused_without_it(
    mount: dict[str, Any], feature: Feature
) -> None:
    plain = a_record()
    record = replace(plain, mount=replace(plain.mount, group=None, readonly=False))
    needs.check(record, frozenset())
    record = replace(record, mount=replace(record.mount, **mount))
    with raised("FeatureMissing", match=f"does not offer {feature.name}"):
        needs.check(record, frozenset(Feature) - {feature})
    needs.check(record, {feature})


def test_group_of_read_only_volume_needs_no_feature_group() -> None:
    plain = a_record()
    mount = replace(plain.mount, group=volumes.GroupChange(7), readonly=True)
    needs.check(replace(plain, mount=mount), {Feature.READ_ONLY})


def test_sub_path_is_refused_by_runtime_that_mounts_whole_volumes() -> None:
    assert Resolved(a_record(), "").require_whole() == a_record()
    with raised("SubPathUnsupported", match="a/b"):
        Resolved(a_record(), "a/b").require_whole()


def _claim(store: Store) -> Claim:
    paths = layout.Layout(store.root).entry(TARGET)
    lock = claims.ClaimLock.acquire(paths, TARGET)
    return Claim(paths, a_record(), volumes.SandboxId("box"), lock=lock)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(f"{tmp_path}/volumes")
    made.open()
    made.publish(a_record())
    return made


def _left(store: Store) -> claims.Claim | None:
    entry = store.read(TARGET)
    assert entry is not None
    return entry.claim


@pytest.mark.spec("H-29")
@pytest.mark.parametrize("handed_over", [False, True])
def test_release_with_error_leaves_the_reason_for_people(
    store: Store, *, handed_over: bool
) -> None:
    claim = _claim(store)
    if handed_over:
        claim.hand_over()
    claim.release(error="the kernel has no xfs")
    left = _left(store)
    assert left is not None
    assert (left.state, left.error, left.live) == (State.ERROR, "the kernel has no xfs", False)
    _claim(store).release()  # the next claim removes it
    assert _left(store) is None


def test_block_that_fails_leaves_an_error_of_crust_and_no_text_of_others(store: Store) -> None:
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


async def test_handler_base_offers_nothing() -> None:
    base: service.Handler = service.HandlerBase()
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
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="crust-") as path:
        yield path


class RefusingRegistry(handlers_pb2_grpc.HandlerRegistryServicer):
    async def Register(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the name is invalid: use a-z")
        yield None

    async def GetVolumeSecrets(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


async def test_refused_registration_raises_one_error_and_logs_its_sentence(
    run_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    where = f"{run_dir}/s"
    server = grpc.aio.server()
    handlers_pb2_grpc.add_HandlerRegistryServicer_to_server(RefusingRegistry(), server)
    server.add_insecure_port(f"unix:{where}")
    await server.start()
    request = registration.RegisterRequest(
        volumes.HandlerName("box"), "1", "/run/box.sock", frozenset({"ext4"})
    )
    with caplog.at_level(logging.WARNING), pytest.raises(errors.InvalidRequest, match="use a-z"):
        async with registration.registered(where, request):
            await asyncio.Event().wait()
    await server.stop(None)
    (line,) = [
        each.getMessage() for each in caplog.records if "not registered" in each.getMessage()
    ]
    assert where in line
    assert "box" in line
    assert "use a-z" in line
