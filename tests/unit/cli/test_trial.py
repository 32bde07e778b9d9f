"""`crust try`: which trials were killed. Its steps: tests/integration/chain/test_try.py."""

from pathlib import Path

from crust.cli import trial
from crust.core import errors
from tests.support.faults import lies


def test_killed_trials_are_all_or_an_error(tmp_path: Path) -> None:
    note = tmp_path / "plugins/kubernetes.io/csi/driver/volume/crust-try.json"
    note.parent.mkdir(parents=True)
    note.touch()
    assert trial.killed_trials(str(tmp_path)) == (note,)
    with trial.locked(note):
        assert trial.killed_trials(str(tmp_path)) == ()

    def ask() -> tuple[Path, ...]:
        return trial.killed_trials(str(tmp_path))

    concerns = lies.Concerns(frozenset(), (str(tmp_path),))
    for asked in lies.failures(ask, concerns, errnos_of=lies.all_errnos):
        is_lock = asked.failure.call.startswith("fcntl")  # EACCES is an answer then
        assert is_lock or isinstance(asked.error, errors.CrustError), str(asked.failure)
