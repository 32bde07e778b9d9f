"""A keeper that lies: what a runtime asks it gets no true answer, and costs neither a claim nor a virtual machine.

Another peer stands at the socket of a keeper that lives and holds: nothing listens, the queue is full, or it never
answers, answers nonsense or in no protocol, or ends the connection. Only the first says that the keepers have ended.
"""

import contextlib
import socket as sockets
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from crust.core import errors
from crust.handoff import claims
from crust.handoff.store import Store
from crust.runtime_handler.blocking import Claim, claim_volume, keepers, kept_vm, process_of
from tests.integration.runtime_handler.conftest import ONE, TWO, is_held
from tests.support.faults.lying_peers import Way, standing_in
from tests.support.records.records import HANDLER, TARGET

pytestmark = pytest.mark.root

NONSENSE = (
    b"\xff\n",
    b"[]\n",
    b"null\n",
    b'{"pids": 1, "vm": 2, "held": {}, "put": {}}\n',
    b'{"pids": [1, 2], "vm": 2, "held": {}, "put": []}\n',
    b'{"error": {}}\n',
    b'{"version": 3, "pids": [1, 2], "vm": 2, "held": {}, "put": {}}\n',
)
"""Answers that are no keeper's."""

Vm = kept_vm.KeptVm
ASKED: dict[str, Callable[[Vm], keepers.Keeper]] = {
    "connect": lambda vm: keepers.connect(vm.socket),
    "start": lambda vm: keepers.start(vm.socket, vm.process),
    "recover": lambda vm: vm.recover({"a": TARGET}),
}


@pytest.fixture
def vm(
    store: Store, claim: Claim, process: subprocess.Popen[bytes], socket: Path
) -> kept_vm.KeptVm:
    """A machine whose keeper holds the claim of its volume."""
    made = kept_vm.KeptVm(store.root, HANDLER, ONE, process_of(process.pid), socket)
    with keepers.start(made.socket, made.process) as line:
        line.hold("a", claim.fds)
        claim.hand_over(*line.pids)
    return made


def _asked(question: str, vm: Vm, way: Way, nonsense: bytes) -> errors.CrustError | None:
    """The refusal of a question while another peer stands in; a keeper that was found holds nothing."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(keepers, "_ANSWER_S", 0.05)
        patched.setattr(kept_vm, "_STILL_OURS_S", 0.05)
        with standing_in(str(vm.socket), way, nonsense=nonsense):
            try:
                line = ASKED[question](vm)
            except errors.CrustError as refusal:
                return refusal
            with line:
                assert line.held() == {}
    return None


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("question", ASKED)
def test_lie_at_keepers_socket_costs_no_claim_and_no_machine(
    question: str,
    way: Way,
    store: Store,
    claim: Claim,
    vm: Vm,
    process: subprocess.Popen[bytes],
) -> None:
    answers = NONSENSE if way is Way.NONSENSE else NONSENSE[:1]
    refusals = [_asked(question, vm, way, nonsense) for nonsense in answers]
    is_another_started = (question, way) == ("start", Way.REFUSED)
    assert (None in refusals) is is_another_started
    for refusal in refusals:
        assert not isinstance(refusal, kept_vm.VmKilled | errors.NotFound)
        assert not isinstance(refusal, keepers.KeeperGone) or way is Way.REFUSED
    assert process.poll() is None
    assert is_held(store, claim.record.device)
    with pytest.raises(claims.HeldBySandbox):
        claim_volume(store.root, TARGET, TWO, HANDLER)
    with ASKED[question](vm) as line:
        assert line.held() == {"a": 2}


BROKEN: dict[str, tuple[bytes | None, type[errors.CrustError]]] = {
    "hangs": (None, keepers.KeeperNotResponding),
    "ends": (b"", keepers.KeeperGone),
    "garbage": (b"\x00\xffno protocol\r\n", errors.RuntimeFailed),
    "endless": (b"x" * (2 << 20), errors.RuntimeFailed),
    **{f"nonsense {number}": (data, errors.RuntimeFailed) for number, data in enumerate(NONSENSE)},
}
"""What comes in place of an answer, over a connection that was a keeper's, and its error."""
REQUESTS: dict[str, Callable[[keepers.Keeper], object]] = {
    "held": keepers.Keeper.held,
    "hold": lambda line: line.hold("a", (0,)),
    "release": lambda line: line.release("a"),
    "put": lambda line: line.put("a", "/over", new="/new", back="/back"),
    "withdraw": lambda line: line.withdraw("/over"),
}


def _send(line: sockets.socket, answer: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the answer is not read to its end
        line.sendall(answer)
    if not answer:
        line.shutdown(sockets.SHUT_WR)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("broken", BROKEN)
def test_broken_answer_of_a_keeper_is_an_error(broken: str, request_: str) -> None:
    answer, expected = BROKEN[broken]
    ours, theirs = sockets.socketpair()
    with ours, theirs, keepers.Keeper(Path("/keeper.sock"), ours) as line:
        ours.settimeout(0.05 if answer is None else 60)
        sender = threading.Thread(target=_send, args=(theirs, answer or b""))
        if answer is not None:
            sender.start()
        with pytest.raises(expected):
            REQUESTS[request_](line)
        ours.close()
        if answer is not None:
            sender.join()
