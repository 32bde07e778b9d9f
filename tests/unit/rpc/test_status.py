"""Errors, status codes and residue: no final code for a publish of which something exists or may exist."""

import io
import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from crust.core import errors, logs
from crust.rpc import status
from crust.rpc.call import fields_of
from crust.rpc.messages import redaction
from crust.rpc.status import PeerStatus, Residue
from crust.wire.csi.v1 import csi_pb2
from crust.wire.v1 import handlers_pb2
from tests.support.co import capability as capability_of
from tests.support.drivers.fake_driver import Failure
from tests.support.kubelet.csi import NOT_FINAL
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.places import Places
from tests.support.pages import error_table

Code = grpc.StatusCode
BRANCHES = [
    branch
    for branch in errors.CrustError.__subclasses__()
    if branch.__module__ == "crust.core.errors"
]


def test_every_branch_has_a_code_of_its_own() -> None:
    assert set(BRANCHES) <= set(status.CODES)
    codes = [status.CODES[branch] for branch in BRANCHES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("leaf", error_table.all_errors(), ids=lambda leaf: leaf.__qualname__)
def test_every_error_has_a_branch(leaf: type[errors.CrustError]) -> None:
    branch = status.branch_of(leaf)
    assert branch in status.CODES
    internal = status.CODES[branch] is grpc.StatusCode.INTERNAL
    assert internal == issubclass(leaf.answered_as or leaf, errors.RuntimeFailed)
    assert leaf.__doc__


@pytest.mark.parametrize("branch", BRANCHES, ids=lambda branch: branch.__name__)
def test_peers_status_comes_back_with_its_sentence(branch: type[errors.CrustError]) -> None:
    error = branch("it failed", why="so", hint="do this")
    back = status.to_error(_of_peer(status.code_of(error), str(error)))
    assert type(back) is branch
    assert str(back) == "it failed: so; do this"


def test_to_error_of_an_error_of_crust_keeps_its_name() -> None:
    details = status_pb2.Status(code=9, message="[ThawedEarly] it went on; retry")
    details.details.add().Pack(
        error_details_pb2.ErrorInfo(reason="ThawedEarly", domain="crust.dev")
    )
    back = status.to_error(
        _of_peer(Code.FAILED_PRECONDITION, details.message, details.SerializeToString())
    )
    assert type(back) is errors.NotReady
    assert (back.error_name, str(back)) == ("ThawedEarly", "it went on; retry")
    assert back.shown() == details.message


@pytest.mark.parametrize(
    ("reason", "domain"), [("ThawedEarly", "vendor.example"), ("Two words", "crust.dev"), ("", "crust.dev")]
)  # fmt: skip
def test_foreign_details_have_the_branchs_name(reason: str, domain: str) -> None:
    details = status_pb2.Status(code=9, message="it went on")
    details.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
    for raw in (details.SerializeToString(), b"\xff", b""):
        back = status.to_error(_of_peer(Code.FAILED_PRECONDITION, "it went on", raw))
        assert back.shown() == "[NotReady] it went on"


@pytest.mark.parametrize(
    ("code", "branch"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.PeerUnavailable),
        (grpc.StatusCode.CANCELLED, errors.PeerUnavailable),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Refused),
        (grpc.StatusCode.UNKNOWN, errors.RuntimeFailed),
    ],
)
def test_codes_without_a_row_become_the_nearest_branch(
    code: grpc.StatusCode, branch: type[errors.CrustError]
) -> None:
    assert type(status.to_error(_of_peer(code, "words"))) is branch


def test_every_code_that_there_is_comes_back_as_an_error() -> None:
    for code in grpc.StatusCode:
        assert str(status.to_error(_of_peer(code, ""))) != ""


def test_error_without_a_branch_is_internal() -> None:
    assert status.code_of(errors.CrustError("bare")) is grpc.StatusCode.INTERNAL


def _of_peer(code: grpc.StatusCode, message: str, raw: bytes = b"") -> PeerStatus:
    return PeerStatus(code, message, (("grpc-status-details-bin", raw),) if raw else ())


@pytest.mark.parametrize("residue", [Residue.EXISTS, Residue.OTHER])
@pytest.mark.parametrize("branch", status.CODES)
def test_publish_that_left_something_has_no_final_code(
    branch: type[errors.CrustError], residue: Residue
) -> None:
    code = status.CODES[status.branch("NodePublishVolume", branch("x"), residue)]
    allowed = {Code.ALREADY_EXISTS} if residue is Residue.OTHER else set()
    assert code in NOT_FINAL | allowed


@pytest.mark.parametrize("branch", status.CODES)
@pytest.mark.parametrize("rpc", ["NodePublishVolume", "NodeUnpublishVolume", "NodeStageVolume"])
def test_error_that_left_nothing_keeps_its_code(rpc: str, branch: type[errors.CrustError]) -> None:
    assert status.branch(rpc, branch("x"), Residue.NONE) is branch


@pytest.mark.parametrize("residue", Residue)
@pytest.mark.parametrize("branch", status.CODES)
def test_expansion_is_never_failed_precondition_unless_a_restart_helps(
    branch: type[errors.CrustError], residue: Residue
) -> None:
    error = branch("x")
    assert status.branch("RuntimeExpandVolume", error, residue) is not errors.NotReady
    error.error_name = "OfflineExpansionOnly"
    assert status.branch("RuntimeExpandVolume", error, residue) is branch


def test_answer_keeps_sentence_and_name() -> None:
    class Particular(errors.NotReady):
        """Some error."""

    error = Particular("it", why="is so", hint="do that")
    answered = status.answer("NodePublishVolume", error, Residue.EXISTS)
    assert isinstance(answered, errors.PeerUnavailable)
    assert answered.shown() == error.shown() == "[Particular] it: is so; do that"
    assert status.answer("NodePublishVolume", error, Residue.NONE) is error


def test_drivers_status_that_may_pass_is_the_same_object() -> None:
    error = PeerStatus(Code.RESOURCE_EXHAUSTED, "no slot")
    assert status.answer("NodePublishVolume", error, Residue.EXISTS) is error
    assert not status.is_final(error)


def test_finality_is_the_kubelets() -> None:
    for code in Code:
        error = PeerStatus(code, "x")
        if code is not Code.OK:
            assert status.is_final(error) is (code not in NOT_FINAL), code


SECRET = "s3same-0pen"


@pytest.mark.parametrize(
    ("message", "described"),
    [
        (
            csi_pb2.NodePublishVolumeRequest(volume_id="v", secrets={"user": SECRET}),
            {"volume_id": "v", "secrets": "***"},
        ),
        (
            csi_pb2.CreateVolumeRequest(
                volume_capabilities=[capability_of(mount_flags=[f"password={SECRET}"])]
            ),
            {
                "volume_capabilities": [
                    {
                        "mount": {"fs_type": "ext4", "mount_flags": "***"},
                        "access_mode": {"mode": capability_of().access_mode.mode},
                    }
                ]
            },
        ),
        *(
            (
                csi_pb2.NodePublishVolumeRequest(volume_context={key: SECRET, "pool": "a"}),
                {"volume_context": {key: "***", "pool": "a"}},
            )
            for key in (
                "csi.storage.k8s.io/serviceAccount.tokens",
                "adminPassword",
                "SECRET_ref",
                "apiKey",
                "credentials",
            )
        ),
        (
            csi_pb2.NodeGetInfoResponse(node_id="n", supported_file_systems=["ext4", "xfs"]),
            {"node_id": "n", "supported_file_systems": ["ext4", "xfs"]},
        ),
    ],
)
def test_description_of_a_message_hides_its_secrets_alone(
    message: Any, described: dict[str, Any]
) -> None:
    assert redaction.describe(message) == described


def test_every_field_that_csi_marks_in_every_message_is_replaced() -> None:
    marked = 0
    for message in csi_pb2.DESCRIPTOR.message_types_by_name.values():
        for field in message.fields:
            if redaction.is_marked(field):
                marked += 1
                built = getattr(csi_pb2, message.name)(**{field.name: {"k": SECRET}})
                assert SECRET not in str(redaction.describe(built))
    assert marked >= 10


@pytest.fixture
def everything_logged(logging_restored: None) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(level="debug", fmt="json", stream=stream)
    return stream


async def test_planted_secret_is_in_no_log_file_or_error(
    everything_logged: io.StringIO, short: str
) -> None:
    """The whole life of a volume with secrets in every field that can hold one, logged at level debug."""
    places = Places.make(short)
    context = {"csi.storage.k8s.io/serviceAccount.tokens": SECRET, "pool": "a"}
    async with FakeNode(places) as node, node.handler():
        target = places.target("one")
        fields: dict[str, Any] = {"secrets": {"key": SECRET}, "volume_context": context}
        await node.co.publish("vol-1", target, **fields)
        await node.co.publish("vol-1", target, **fields)
        flags = [f"password={SECRET}"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.co.publish(
                "vol-2", places.target("two"), capability_of(mount_flags=flags), **fields
            )
        assert SECRET not in str(refused.value)
        assert _files_with(SECRET, short) == []
        with node.sandbox(target):
            await node.co.stats("vol-1", target)
        await node.co.unpublish("vol-1", target)
    text = everything_logged.getvalue()
    assert "NodePublishVolume" in text
    assert "deferred" in [json.loads(line)["message"] for line in text.splitlines()]
    assert SECRET not in text


async def test_secret_in_drivers_error_reaches_caller_and_no_log(
    everything_logged: io.StringIO, short: str
) -> None:
    """In a call that passes as bytes, in a deferred one, and in one whose code the proxy changes."""
    places = Places.make(short)
    secrets = {"key": SECRET, "pin": "q7x"}
    failure = Failure(grpc.StatusCode.INTERNAL, f"login {SECRET} with q7x failed")
    async with FakeNode(places) as node, node.handler():
        for defer in (False, True):
            node.driver.failures["NodePublishVolume"] = failure
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await node.co.publish("vol-1", places.target("one"), defer=defer, secrets=secrets)
            assert refused.value.details() == f"login {SECRET} with q7x failed"
        stage = csi_pb2.NodeStageVolumeRequest(volume_id="vol-1", secrets=secrets)
        node.driver.failures["NodeStageVolume"] = failure
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node.co.node.NodeStageVolume(stage, timeout=10)
        assert SECRET in str(refused.value.details())
    text = everything_logged.getvalue()
    assert "login *** with *** failed" in text
    assert SECRET not in text
    assert "q7x" not in text


@pytest.mark.parametrize("key", ["userID", "adminID", "node.session.auth.username"])
def test_user_name_beside_secret_is_not_hidden_in_error(key: str) -> None:
    secrets = {key: "admin", "userKey": SECRET}
    request = csi_pb2.NodeStageVolumeRequest(volume_id="v", secrets=secrets)
    text = f"client.admin cannot log in with {SECRET}: ask an administrator for its caps"
    shown = redaction.without_secrets(text, request)
    assert shown == text.replace(SECRET, "***")
    assert redaction.describe(request)["secrets"] == "***"


@pytest.mark.parametrize("key", ["userKey", "secretID", "user.password", "pin"])
def test_secret_that_is_common_word_is_hidden_in_error(key: str) -> None:
    request = csi_pb2.NodeStageVolumeRequest(volume_id="v", secrets={key: "admin"})
    shown = redaction.without_secrets("no admin", request)
    assert shown == "no ***"


def _files_with(secret: str, root: str) -> list[str]:
    return [
        str(path)
        for path in Path(root).rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]


def test_passed_request_is_read_and_not_kept() -> None:
    request = csi_pb2.NodePublishVolumeRequest(
        volume_id="v", target_path="/t", staging_target_path="/s", secrets={"a": "hidden"}
    )
    fields = fields_of(request, "d")
    assert {key: fields[key] for key in ("driver", "volume_id", "target")} == {
        "driver": "d",
        "volume_id": "v",
        "target": "/t",
    }
    assert "hidden" not in repr(fields)


@pytest.mark.parametrize("named", ["", "a b", "a\nb", "x" * 65, b"bytes", "0a1b2c"])
def test_id_of_the_caller_is_taken_if_it_is_one(named: str | bytes) -> None:
    fields = fields_of(None, metadata=(("crust-request-id", named),))
    assert (fields["request_id"] == named) is (named == "0a1b2c")
    assert fields["request_id"] == named or len(fields["request_id"]) == 12


def test_volume_of_request_with_target_alone_is_in_metadata() -> None:
    request = handlers_pb2.GetVolumeStatsRequest(target_path="/t")
    fields = fields_of(request, metadata=(("crust-volume-bin", "d\0é".encode()),))
    assert (fields["driver"], fields["volume_id"], fields["target"]) == ("d", "é", "/t")


def test_long_name_is_cut() -> None:
    fields = fields_of(csi_pb2.DeleteVolumeRequest(volume_id="v" * 9999))
    assert len(fields["volume_id"]) == 256
