"""The content of a driver's log (C-601, C-602)."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crust.wire.csi.v1 import csi_pb2
from crust_conformance.orchestrator import copies, expansion
from crust_conformance.orchestrator.capabilities import (
    CLONE,
    EXPAND,
    GROUP,
    NODE_EXPAND,
    ONLINE,
    SNAPSHOT,
)
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.optional_rpcs import RPCS

_TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"


def test_c601_no_secret_is_in_the_log(co: Co) -> None:
    password, token, flag = (co.name("planted") for _ in range(3))
    with _log_has_none_of(co, password, token, flag):
        co.secrets["password"] = password
        volume, target = co.staged()
        publish = co.publish_request(volume, target)
        publish.volume_context[_TOKENS] = token
        co.ask(publish)
        _copy_and_grow(co, volume)
        publish.volume_capability.mount.mount_flags.append(f"password={flag}")
        publish.target_path = str(co.target())
        co.outcome(publish)
        co.unpublish(volume.volume_id, target)


def test_c602_refusals_contain_no_secret(co: Co) -> None:
    password, token, flag = (co.name("planted") for _ in range(3))
    with _log_has_none_of(co, password, token, flag):
        for rpc in RPCS:
            request = _planted(rpc.request, password, token, flag)
            message = co.outcome(request)[1]
            name = rpc.request.DESCRIPTOR.name
            assert password not in message, f"{name} was refused with the secret in the message"
            with co.should():
                assert token not in message, f"{name} was refused with the token in the message"
                assert flag not in message, f"{name} was refused with the mount flag in the message"


def _copy_and_grow(co: Co, volume: csi_pb2.Volume) -> None:
    if SNAPSHOT in co.has:
        snapshot = copies.snapshot(co, volume.volume_id)
        co.volume(source=copies.of_snapshot(snapshot.snapshot_id))
    if CLONE in co.has:
        co.volume(source=copies.of_volume(volume.volume_id))
    if GROUP in co.has:
        copies.take_group(co, copies.group_request(co, [volume.volume_id]))
    if EXPAND in co.has and ONLINE in co.has:
        co.until_final(expansion.controller_request(co, volume))
    if NODE_EXPAND in co.has:
        nowhere = expansion.node_request(co, volume, co.target())
        co.outcome(nowhere)


def _planted(request: Any, password: str, token: str, flag: str) -> Any:
    planted = copy.deepcopy(request)
    fields = request.DESCRIPTOR.fields_by_name
    if "secrets" in fields:
        planted.secrets["password"] = password
    if "volume_context" in fields:
        planted.volume_context[_TOKENS] = token
    if "volume_capability" in fields:
        planted.volume_capability.mount.mount_flags.append(f"password={flag}")
    for volume_capability in planted.volume_capabilities if "volume_capabilities" in fields else ():
        volume_capability.mount.mount_flags.append(f"password={flag}")
    return planted


@contextmanager
def _log_has_none_of(co: Co, password: str, token: str, flag: str) -> Iterator[None]:
    assert co.options.log is not None
    offset = co.options.log.stat().st_size
    yield
    with co.options.log.open("rb") as file:
        file.seek(offset)
        logged = file.read()
    with co.should():
        assert token.encode() not in logged, "a token of volume_context is in the log"
        assert flag.encode() not in logged, "a mount flag is in the log"
    assert password.encode() not in logged, "a secret is in the log"
