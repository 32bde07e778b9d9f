"""The command as a whole: its words, and what it imports."""

import subprocess
import sys

import pytest

from tests.support.nodes.commands import invoked


@pytest.mark.parametrize("word", ["help", "version"])
async def test_word_that_is_an_option_here_is_suggested_as_one(word: str) -> None:
    result = await invoked(word)
    assert result.exit_code == 2
    assert f"Did you mean '--{word}'?" in result.output


SLOW = ("pydantic", "prometheus_client", "yaml", "crust.proxy")

OF_GRPC = ("asyncio", "grpc", "google.protobuf", "rich", "ssl")
"""What takes time, and what an optional dependency may be missing for."""


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        (["--help"], SLOW + OF_GRPC),
        (["completion", "bash"], SLOW + OF_GRPC),
        (["explain", "MountFailed"], SLOW + OF_GRPC),
        (["status", "--run-dir", "/nonexistent"], SLOW),
    ],
)
def test_command_imports_nothing_slow_that_it_does_not_need(
    words: list[str], slow: tuple[str, ...]
) -> None:
    program = (
        "import contextlib, sys\nfrom crust.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main({words!r}, standalone_mode=False)\n"
        f"print([name for name in {slow!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
