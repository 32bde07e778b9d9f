"""The table of errors and status codes is complete in both directions."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from crust.core import errors
from crust.rpc import status
from crust.rpc.status import PeerStatus
from tests.support.pages import error_table

Code = grpc.StatusCode
BRANCHES = [
    each for each in errors.CrustError.__subclasses__() if each.__module__ == "crust.core.errors"
]


def test_every_branch_has_a_row_and_no_two_branches_share_a_code() -> None:
    assert set(BRANCHES) <= set(status.CODES)
    codes = [status.CODES[branch] for branch in BRANCHES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("leaf", error_table.all_errors(), ids=lambda each: each.__qualname__)
def test_every_error_has_a_branch_and_internal_is_runtime_failed(
    leaf: type[errors.CrustError],
) -> None:
    branch = status.branch_of(leaf)
    assert branch in status.CODES
    internal = status.code_of_class(leaf) is grpc.StatusCode.INTERNAL
    assert internal == issubclass(leaf.answered_as or leaf, errors.RuntimeFailed)
    assert leaf.__doc__


@pytest.mark.parametrize("branch", BRANCHES, ids=lambda each: each.__name__)
def test_a_peers_status_comes_back_as_its_branch_with_the_peers_sentence(
    branch: type[errors.CrustError],
) -> None:
    there = branch("it failed", why="so", hint="do this")
    back = status.to_error(_of_peer(status.code_of(there), str(there)))
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
def test_to_error_of_another_programs_details_has_the_branchs_name(
    reason: str, domain: str
) -> None:
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


def test_an_error_without_a_branch_is_internal() -> None:
    assert status.code_of(errors.CrustError("bare")) is grpc.StatusCode.INTERNAL


def _of_peer(code: grpc.StatusCode, message: str, raw: bytes = b"") -> PeerStatus:
    return PeerStatus(code, message, (("grpc-status-details-bin", raw),) if raw else ())
