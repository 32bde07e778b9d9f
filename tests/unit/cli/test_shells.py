"""Completion in a shell."""

import pytest
from click.testing import CliRunner

from crust.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_a_shell_calls_the_command_for_completions(shell: str) -> None:
    result = CliRunner().invoke(main.main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_CRUST_COMPLETE={shell}_complete" in result.output


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("crust hand", "handlers"),
        ("crust volumes --sta", "--state"),
        ("crust drivers -o w", "wide"),
    ],
)
def test_completion_of_a_line_has_commands_flags_and_values(line: str, wanted: str) -> None:
    words = {"_CRUST_COMPLETE": "bash_complete", "COMP_WORDS": line}
    words["COMP_CWORD"] = str(len(line.split()) - 1)
    result = CliRunner().invoke(main.main, [], env=words, prog_name="crust")
    assert f"plain,{wanted}" in result.output.splitlines()
