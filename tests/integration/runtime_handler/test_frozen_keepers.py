"""Keepers and runtimes of earlier commits (tests/data/nodes): each meets the present one, as during an upgrade."""

import array
import json
import re
import socket as sockets
import subprocess
from pathlib import Path
from typing import Any

import pytest

from crust.handoff.store import Store
from crust.runtime_handler import keeper as keeper_program
from crust.runtime_handler.blocking import Claim, keepers, kept_vm, process_of
from tests.integration.runtime_handler.conftest import ONE, is_held
from tests.support.raised import raised
from tests.support.records import frozen_nodes
from tests.support.records.frozen_nodes import NO_REQUEST, NO_SCHEMA, PRESENT
from tests.support.records.records import HANDLER, TARGET
from tests.support.runtimes.keeper_processes import kill_all_keepers

pytestmark = [pytest.mark.root, pytest.mark.spec("H-43", "H-56")]


def frozen(commit: str, name: str) -> str:
    return frozen_nodes.load(commit).parts["keeper"][name].text


@pytest.fixture
def start_earlier(
    run_dir: str, process: subprocess.Popen[bytes], socket: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Start the VM's keeper as a commit had it."""

    def start(commit: str) -> None:
        program = Path(run_dir, "keeper.py")
        program.write_text(frozen(commit, "keeper.py"))
        with monkeypatch.context() as patched:
            patched.setattr(keeper_program, "__file__", str(program))
            keepers.start(socket, process_of(process.pid)).close()

    return start


def staged(run_dir: str) -> dict[str, str]:
    """The files that a put names."""
    paths = {name: f"{run_dir}/{name}" for name in ("over", "new", "back")}
    for name, path in paths.items():
        Path(path).write_text(name)
    return paths


@pytest.mark.parametrize("commit", [NO_REQUEST, PRESENT])
def test_keeper_of_an_earlier_commit_serves_the_present_runtime(
    commit: str,
    start_earlier: Any,
    run_dir: str,
    store: Store,
    claim: Claim,
    process: subprocess.Popen[bytes],
    socket: Path,
) -> None:
    start_earlier(commit)
    paths = staged(run_dir)
    with keepers.start(socket, process_of(process.pid)) as line:
        line.hold("a", claim.fds)
        line.put("a", **paths, user="box")
    claim.hand_over(*line.pids)
    vm = kept_vm.KeptVm(store.root, HANDLER, ONE, process_of(process.pid), socket)
    with vm.recover({"a": TARGET}) as line:
        assert line.held() == {"a": 2}
        assert line.put_files == {paths["over"]: keepers.PutFile("a", frozenset({"box"}))}
        line.withdraw(paths["over"], "box")
        assert Path(paths["over"]).read_text() == "back"
    kill_all_keepers(socket)
    assert not is_held(store, claim.record.device)
    with vm.recover({"a": TARGET}) as line:  # claimed again, and held by the present keeper
        assert is_held(store, claim.record.device)
        line.release("a")
    assert not is_held(store, claim.record.device)


def test_keeper_that_names_no_users_is_refused_and_holds(
    claim: Claim, start_earlier: Any, run_dir: str, store: Store, socket: Path
) -> None:
    start_earlier(NO_SCHEMA)
    paths = staged(run_dir)
    with keepers.connect(socket) as line:
        line.hold("a", claim.fds)
        claim.hand_over(*line.pids)
        with raised("KeeperRefused", match="its answer is not a keeper's"):
            line.put("a", **paths)
    with raised("KeeperRefused", match="its answer is not a keeper's"):
        keepers.connect(socket)
    assert is_held(store, claim.record.device)
    with sockets.socket(sockets.AF_UNIX) as line_of_then:
        line_of_then.connect(str(socket))
        assert answered(line_of_then, {"op": "release", "name": "a"}, ())["put"] == {}
    assert Path(paths["over"]).read_text() == "back"


def answered(line: sockets.socket, request: dict[str, str], fds: tuple[int, ...]) -> dict[str, Any]:
    """The answer to the bytes of a request."""
    rights = [(sockets.SOL_SOCKET, sockets.SCM_RIGHTS, array.array("i", fds))] if fds else []
    line.sendmsg([json.dumps(request).encode() + b"\n"], rights)
    answer: dict[str, Any] = json.loads(line.makefile().readline())
    return answer


@pytest.mark.parametrize("commit", [NO_REQUEST, PRESENT])
def test_present_keeper_serves_the_runtime_of_an_earlier_commit(
    commit: str, run_dir: str, process: subprocess.Popen[bytes], socket: Path
) -> None:
    """What the runtime read of an answer then is in the present one, with the same value."""
    staged(run_dir)
    keepers.start(socket, process_of(process.pid)).close()
    said = json.loads(re.sub("DIRECTORY", run_dir, frozen(commit, "said.json")))
    with sockets.socket(sockets.AF_UNIX) as line, open(f"{run_dir}/over") as file:
        line.connect(str(socket))
        for request, expected in said:
            fds = (file.fileno(),) if request["op"] == "hold" else ()
            answer = answered(line, request, fds)
            assert len(answer.pop("pids")) == len(expected.pop("pids"))
            assert answer.pop("vm") == process.pid
            assert answer == {key: expected[key] for key in ("held", "put")} | {
                "version": keeper_program.VERSION
            }


def test_keeper_of_an_unknown_version_is_refused_by_name() -> None:
    ours, theirs = sockets.socketpair()
    with ours, theirs, keepers.Keeper(Path("/keeper.sock"), ours) as line:
        theirs.sendall(b'{"version": 3, "pids": [1, 2], "vm": 2, "held": {}, "put": {}}\n')
        with raised("KeeperRefused", match="version 3, which this process cannot read"):
            line.held()
