"""A file that a keeper puts is there while its claim lives, and never after, whichever process is killed."""

import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.runtime_handler.blocking import keepers, process_of
from tests.support import processes
from tests.support.raised import raised

pytestmark = [pytest.mark.root, pytest.mark.spec("H-56")]

OF_ALL = keepers.PutFile("a", frozenset({""}))
"""A file of claim "a", for which no user is named."""


@pytest.fixture
def keeper(
    socket: Path, run_dir: str, process: subprocess.Popen[bytes]
) -> Iterator[keepers.Keeper]:
    """The VM's keeper, which holds a file as the claim "a"."""
    with keepers.start(socket, process_of(process.pid)) as line:
        with open(f"{run_dir}/held", "wb") as held:
            line.hold("a", [held.fileno()])
        yield line


def _staged(run_dir: str, at: str = "file") -> tuple[str, str, str]:
    """The file, what is put over it, and what replaces it at last."""
    paths = f"{run_dir}/{at}", f"{run_dir}/{at}.new", f"{run_dir}/{at}.back"
    for path, text in zip(paths, ("before", "put", "back"), strict=True):
        Path(path).write_text(text)
    return paths


def test_it_is_put_and_withdrawn(keeper: keepers.Keeper, run_dir: str) -> None:
    over, new, back = _staged(run_dir)
    keeper.put("a", over, new=new, back=back)
    assert Path(over).read_text() == "put"
    assert keeper.put_files == {over: OF_ALL}
    keeper.withdraw(over)
    keeper.withdraw(over)
    assert Path(over).read_text() == "back"
    assert keeper.put_files == {}


def test_it_stays_until_each_user_has_withdrawn_it(keeper: keepers.Keeper, run_dir: str) -> None:
    """The standby knows them too."""
    over, new, back = _staged(run_dir)
    keeper.put("a", over, new=new, back=back, user="one")
    for text in ("put", "put"):  # the next user, and the same one again
        Path(new).write_text(text)
        keeper.put("a", over, new=new, back=back, user="two")
    processes.end(keeper.pids[0])
    with keepers.connect(keeper.path) as line:
        assert line.put_files == {over: keepers.PutFile("a", frozenset({"one", "two"}))}
        for user in ("one", "another"):
            line.withdraw(over, user)
            assert Path(over).read_text() == "put"
        line.withdraw(over, "two")
    assert Path(over).read_text() == "back"


def test_changes_together_are_all_made_by_one_standby(
    keeper: keepers.Keeper, run_dir: str, process: subprocess.Popen[bytes]
) -> None:
    """As many claims as a pod may have volumes, each with two descriptors and a file of a long path."""
    overs = {}
    with (
        open(f"{run_dir}/lock", "wb") as lock,
        open(f"{run_dir}/held") as device,
        keeper.together(),
    ):
        standby = keeper.pids[1]
        for name in (f"{number:064}" for number in range(24)):
            over, new, back = _staged(run_dir, f"{name}{'x' * 180}")
            overs[over] = name
            keeper.hold(name, (lock.fileno(), device.fileno()))
            keeper.put(name, over, new=new, back=back, user="one")
        assert keeper.held() == {"a": 1}
        assert keeper.pids[1] == standby
    processes.end(keeper.pids[0])
    with keepers.connect(keeper.path) as line:
        assert line.held() == {"a": 1, **dict.fromkeys(overs.values(), 2)}
        assert all(Path(over).read_text() == "put" for over in line.put_files)
        assert line.put_files.keys() == overs.keys()
        with line.together():
            for over in overs:
                line.withdraw(over, "one")
        assert {Path(over).read_text() for over in overs} == {"back"}


def test_changes_together_end_with_the_first_error(keeper: keepers.Keeper, run_dir: str) -> None:
    """Each file whose claim is held is there, and known; a descriptor that no request took is closed."""
    over, new, back = _staged(run_dir)
    before = len(os.listdir(f"/proc/{keeper.pid}/fd"))
    with (
        open(f"{run_dir}/held") as held,
        raised("KeeperRefused", match="'b' is not held"),
        keeper.together(),
    ):
        keeper.put("a", over, new=new, back=back)
        keeper.put("b", f"{run_dir}/b", new=new, back=back)
        keeper.hold("b", [held.fileno()])
    assert keeper.held() == {"a": 1}
    assert keeper.put_files == {over: OF_ALL}
    assert Path(over).read_text() == "put"
    assert len(os.listdir(f"/proc/{keeper.pid}/fd")) == before


@pytest.mark.parametrize("killed", [0, 1], ids=["keeper", "standby"])
def test_the_end_of_one_process_changes_nothing(
    keeper: keepers.Keeper, run_dir: str, process: subprocess.Popen[bytes], killed: int
) -> None:
    over, new, back = _staged(run_dir)
    keeper.put("a", over, new=new, back=back)
    processes.end(keeper.pids[killed])
    with keepers.connect(keeper.path) as line:
        assert (line.held(), line.put_files) == ({"a": 1}, {over: OF_ALL})
        assert Path(over).read_text() == "put"
        with processes.ending(*line.pids):
            process.kill()
    assert Path(over).read_text() == "back"


@pytest.mark.spec("H-56")
@pytest.mark.parametrize("how", ["the VM", "the claim"])
def test_it_goes_with_what_ends_first(
    keeper: keepers.Keeper, run_dir: str, process: subprocess.Popen[bytes], how: str
) -> None:
    over, new, back = _staged(run_dir)
    keeper.put("a", over, new=new, back=back)
    if how == "the VM":
        with processes.ending(*keeper.pids):
            process.kill()
    else:
        keeper.release("a")
    assert Path(over).read_text() == "back"


def test_a_file_without_a_claim_is_refused(keeper: keepers.Keeper, run_dir: str) -> None:
    over, new, back = _staged(run_dir)
    with raised("KeeperRefused", match="'b' is not held"):
        keeper.put("b", over, new=new, back=back)
    assert Path(over).read_text() == "before"


def test_what_cannot_be_renamed_is_told(keeper: keepers.Keeper, run_dir: str) -> None:
    with raised("KeeperRefused", match="No such file"):
        keeper.put("a", f"{run_dir}/absent/x", new=f"{run_dir}/absent/y", back=f"{run_dir}/z")
    assert keeper.held() == {"a": 1}


def test_a_file_that_cannot_be_withdrawn_keeps_its_claim(
    keeper: keepers.Keeper, run_dir: str, process: subprocess.Popen[bytes]
) -> None:
    """Somebody has put a directory there: nobody knows what the runtime reads, so nobody else gets the volume."""
    over, new, back = _staged(run_dir)
    keeper.put("a", over, new=new, back=back)
    Path(over).unlink()
    Path(over).mkdir()
    with raised("KeeperRefused", match="Is a directory"):
        keeper.withdraw(over)
    with raised("KeeperRefused", match="Is a directory"):
        keeper.release("a")
    assert keeper.held() == {"a": 1}
    assert keeper.put_files == {over: keepers.PutFile("a", frozenset())}
    with processes.ending(*keeper.pids) as keepers_ends:
        process.kill()
        process.wait()
        assert not select.select(keepers_ends, [], [], 0.5)[0]
        Path(over).rmdir()
    assert Path(over).read_text() == "back"
