"""A command imports what it needs: one that asks no daemon starts without gRPC, an event loop or tables."""

import subprocess
import sys

import pytest

SLOW = ("asyncio", "grpc", "google.protobuf", "pydantic", "rich", "ssl")


@pytest.mark.parametrize("words", [["--help"], ["completion", "bash"], ["explain", "MountFailed"]])
def test_command_that_asks_no_daemon_imports_nothing_slow(words: list[str]) -> None:
    program = (
        "import sys\nfrom crust.cli.main import main\n"
        f"main({words!r}, standalone_mode=False)\n"
        f"print([name for name in {SLOW!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
