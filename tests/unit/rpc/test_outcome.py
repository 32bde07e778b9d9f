"""The residue table: no final code for a publish of which something exists or may exist."""

import grpc
import pytest

from crust.core import errors
from crust.rpc import outcome, status
from crust.rpc.outcome import Residue
from crust.rpc.status import PeerStatus
from tests.support.kubelet.csi import NOT_FINAL

Code = grpc.StatusCode


@pytest.mark.parametrize("residue", [Residue.EXISTS, Residue.OTHER, Residue.UNKNOWN])
@pytest.mark.parametrize("branch", status.CODES)
def test_publish_that_left_something_has_no_final_code_but_already_exists(
    branch: type[errors.CrustError], residue: Residue
) -> None:
    code = status.CODES[outcome.branch("NodePublishVolume", branch("x"), residue)]
    allowed = {Code.ALREADY_EXISTS} if residue is Residue.OTHER else set()
    assert code in NOT_FINAL | allowed


@pytest.mark.parametrize("branch", status.CODES)
@pytest.mark.parametrize("rpc", ["NodePublishVolume", "NodeUnpublishVolume", "NodeStageVolume"])
def test_error_that_left_nothing_keeps_its_code(rpc: str, branch: type[errors.CrustError]) -> None:
    assert outcome.branch(rpc, branch("x"), Residue.NONE) is branch


@pytest.mark.parametrize("residue", Residue)
@pytest.mark.parametrize("branch", status.CODES)
def test_expansion_is_never_failed_precondition_unless_a_restart_helps(
    branch: type[errors.CrustError], residue: Residue
) -> None:
    error = branch("x")
    assert outcome.branch("RuntimeExpandVolume", error, residue) is not errors.NotReady
    error.error_name = "OfflineExpansionOnly"
    assert outcome.branch("RuntimeExpandVolume", error, residue) is branch


def test_answer_keeps_sentence_and_name() -> None:
    class Particular(errors.NotReady):
        """Some error."""

    error = Particular("it", why="is so", hint="do that")
    answered = outcome.answer("NodePublishVolume", error, Residue.EXISTS)
    assert isinstance(answered, errors.PeerUnavailable)
    assert answered.shown() == error.shown() == "[Particular] it: is so; do that"
    assert outcome.answer("NodePublishVolume", error, Residue.NONE) is error


def test_drivers_status_that_may_pass_is_the_same_object() -> None:
    error = PeerStatus(Code.RESOURCE_EXHAUSTED, "no slot")
    assert outcome.answer("NodePublishVolume", error, Residue.UNKNOWN) is error
    assert not outcome.is_final(error)


def test_finality_is_the_kubelets() -> None:
    for code in Code:
        error = PeerStatus(code, "x")
        if code is not Code.OK:
            assert outcome.is_final(error) is (code not in NOT_FINAL), code
