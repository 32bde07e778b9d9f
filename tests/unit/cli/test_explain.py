"""`crust explain`: an error's page, found by the name that was shown."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from crust.cli import explain, main
from tests.support.pages import error_table


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


@pytest.mark.parametrize("kind", error_table.all_errors(), ids=lambda each: each.__name__)
def test_page_of_every_error_says_who_retries_and_what_to_do(kind: explain.Kind) -> None:
    assert kind.retried_by
    assert explain.what_to_do(kind)
    assert explain.page(kind).startswith(f"[{kind.__name__}]\n")


def test_explain_works_without_pytest() -> None:
    """An installed crust has no extras; the conformance suite's cases need pytest."""
    script = "import sys; sys.modules['pytest'] = None; from crust.cli.main import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", script, "explain", "InvalidParametersFile"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")


def test_no_conformance_module_that_explain_leaves_out_defines_an_error() -> None:
    assert {
        each.__module__
        for each in error_table.all_errors()
        if each.__module__.startswith("crust.conformance")
    } == {"crust.conformance.options"}
