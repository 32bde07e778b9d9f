"""A worker that dies is named with the signal that ended it."""

import subprocess
import sys
from pathlib import Path

_DIES = """
import os, signal

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_end_of_a_worker_names_its_signal(tmp_path: Path) -> None:
    (tmp_path / "test_dying.py").write_text(_DIES)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_testnodedown\n")
    options = ("-n1", "--max-worker-restart=0", "-p", "no:cacheprovider", f"--rootdir={tmp_path}")
    command = (sys.executable, "-m", "pytest", *options, str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "gw0 ended: SIGKILL" in done.stderr
