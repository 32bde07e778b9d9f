"""`crust explain`: an error's page, found by the name that was shown."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from crust.cli import main


@pytest.mark.parametrize("name", ["MountFailed", "mountfailed", "[MountFailed]"])
def test_explain_finds_the_name_as_it_was_shown_or_typed(name: str) -> None:
    result = CliRunner().invoke(main.main, ["explain", name])
    assert result.exit_code == 0
    assert result.output.startswith("[MountFailed]\n")
    for words in (
        "INTERNAL",
        "RuntimeFailed",
        "The kernel could not mount",
        "who retries",
        "what to do",
    ):
        assert words in result.output


def test_explain_of_a_misspelt_name_suggests_the_nearest() -> None:
    result = CliRunner().invoke(main.main, ["explain", "MountFaild"])
    assert result.exit_code == 2
    assert "did you mean MountFailed?" in result.output


def test_explain_of_an_unknown_name_exits_2() -> None:
    result = CliRunner().invoke(main.main, ["explain", "qqqqqqqq"])
    assert result.exit_code == 2
    assert "no error of crust is called 'qqqqqqqq'" in result.output
    assert "did you mean" not in result.output


def test_explain_imports_no_module_for_it() -> None:
    """Optional dependencies of other modules may be missing."""
    script = (
        "import sys\n"
        "from crust.cli import explain, main\n"
        "before = set(sys.modules)\n"
        "explain.run('MountFailed')\n"
        "sys.exit(str(set(sys.modules) - before) if 'crust.proxy' in sys.modules else 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
