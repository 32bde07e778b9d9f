"""Errors, status codes and residue: no final code for a publish of which something exists or may exist."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from crust.core import errors
from crust.rpc import status
from crust.rpc.call import Call
from crust.rpc.messages import extensions
from crust.rpc.port import PeerNotReachable, SocketPort
from crust.rpc.status import PeerStatus, Residue
from tests.support.kubelet.csi import NOT_FINAL
from tests.support.nodes.places import Places
from tests.support.pages import error_table
from tests.support.runtimes.hostile_handler import Hostile, serving

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


@pytest.mark.parametrize("rpc", ["NodePublishVolume", "NodeStageVolume"])
@pytest.mark.parametrize("residue", [Residue.EXISTS, Residue.OTHER])
@pytest.mark.parametrize("branch", status.CODES)
def test_publish_that_left_something_has_no_final_code(
    branch: type[errors.CrustError], residue: Residue, rpc: str
) -> None:
    code = status.code_of(status.allowed_error(rpc, branch("x"), residue))
    if (branch, residue) == (errors.Conflict, Residue.OTHER):
        assert code is Code.ALREADY_EXISTS
    else:
        assert code in NOT_FINAL


@pytest.mark.parametrize("branch", status.CODES)
@pytest.mark.parametrize("rpc", ["NodePublishVolume", "NodeUnpublishVolume", "NodeStageVolume"])
def test_error_that_left_nothing_keeps_its_code(rpc: str, branch: type[errors.CrustError]) -> None:
    assert type(status.allowed_error(rpc, branch("x"), Residue.NONE)) is branch


@pytest.mark.parametrize("residue", Residue)
@pytest.mark.parametrize("branch", status.CODES)
def test_expansion_is_never_failed_precondition_unless_a_restart_helps(
    branch: type[errors.CrustError], residue: Residue
) -> None:
    error = branch("x")
    answered = status.allowed_error("RuntimeExpandVolume", error, residue)
    assert type(answered) is not errors.NotReady
    error.error_name = "OfflineExpansionOnly"
    assert status.allowed_error("RuntimeExpandVolume", error, residue) is error


def test_answer_keeps_sentence_and_name() -> None:
    class Particular(errors.NotReady):
        """Some error."""

    error = Particular("it", why="is so", hint="do that")
    answered = status.allowed_error("NodePublishVolume", error, Residue.EXISTS)
    assert isinstance(answered, errors.PeerUnavailable)
    assert answered.shown() == error.shown() == "[Particular] it: is so; do that"
    assert status.allowed_error("NodePublishVolume", error, Residue.NONE) is error


def test_drivers_status_that_may_pass_is_the_same_object() -> None:
    error = PeerStatus(Code.RESOURCE_EXHAUSTED, "no slot")
    assert status.allowed_error("NodePublishVolume", error, Residue.EXISTS) is error
    assert not status.is_final(error)


def test_status_of_a_peer_passes_without_a_name_of_crust() -> None:
    error = PeerStatus(Code.UNAVAILABLE, "no version is set")
    assert status.of(error, _asking_for_names("/csi.v1.Identity/Probe")) is error


def test_status_for_an_absent_peer_has_its_name() -> None:
    absent = PeerNotReachable("nobody", why="is there", hint="start")
    own = PeerStatus.of(absent)
    assert status.of(own, Call("/csi.v1.Identity/Probe", ())) is own
    answered = status.of(own, _asking_for_names("/csi.v1.Identity/Probe"))
    assert status.name_in(answered.trailing) == "PeerNotReachable"
    assert (answered.code, answered.text) == (own.code, own.text)


def _asking_for_names(method: str) -> Call:
    return Call(method, ((extensions.KEY, extensions.ERROR_INFO),))


def test_finality_is_the_kubelets() -> None:
    for code in Code:
        error = PeerStatus(code, "x")
        if code is not Code.OK:
            assert status.is_final(error) is (code not in NOT_FINAL), code


async def test_status_text_of_peer_is_cut_to_what_passes(places: Places) -> None:
    path = f"{places.root}/h.sock"
    async with serving(path, Hostile(text="ä" * 100_000)), SocketPort(path) as port:  # type: ignore[abstract]
        with pytest.raises(PeerStatus) as caught:
            await port.answer(Call("/crust.v1.RuntimeHandler/GetVolumeStats", (), 60), b"")
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert caught.value.text.encode() == "ä".encode() * (status.PEER_TEXT_MAX_BYTES // 2)
