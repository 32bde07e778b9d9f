"""Commands that ask no daemon: what they print, and what they import."""

import datetime
import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from crust.cli import main, output
from crust.cli.inspecting import views

NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Thing:
    name: str
    note: str
    since: datetime.datetime


COLUMNS = (
    output.Column("name", lambda row: row.name, styles={"bad": output.BAD}),
    output.Column("note", lambda row: row.note, wide=True),
)


def test_long_cells_are_neither_cut_nor_wrapped() -> None:
    text = output.table(COLUMNS, [Thing("n" * 300, "", NOW), Thing("é", "x", NOW)], wide=True).plain
    assert text.splitlines() == [f"NAME{' ' * 298}NOTE", f"{'n' * 300}  -", f"é{' ' * 301}x"]


def test_narrow_table_leaves_wide_columns_out() -> None:
    assert output.table(COLUMNS, [Thing("a", "b", NOW)], wide=False).plain == "NAME\na"


def test_control_characters_of_other_programs_are_escaped() -> None:
    text = output.table(COLUMNS, [Thing("a\x1b[31m\nb", "", NOW)], wide=False).plain
    assert text == "NAME\na\\x1b[31m\\nb"


def test_cell_has_the_style_of_its_text() -> None:
    text = output.table(COLUMNS, [Thing("bad", "", NOW)], wide=False)
    assert output.BAD in {str(span.style) for span in text.spans}


def test_document_has_the_names_of_the_fields() -> None:
    found = json.loads(output.document({"things": [Thing("a", "b", NOW)]}))
    assert found == {"things": [{"name": "a", "note": "b", "since": NOW.isoformat()}]}


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (11100, "3h5m"), (9 * 86400, "9d")],
)
def test_age_has_one_or_two_units(seconds: int, shown: str) -> None:
    assert output.age(NOW - datetime.timedelta(seconds=seconds), NOW) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, ""), (1, "1"), (1023, "1023"), (1024, "1Ki"), (1536 * 2**20, "1.5Gi"), (5 * 2**50, "5120Ti")],
)  # fmt: skip
def test_size_has_the_unit_that_fits(count: int, shown: str) -> None:
    assert views.size(count) == shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_a_shell_calls_the_command_for_completions(shell: str) -> None:
    result = CliRunner().invoke(main.main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_CRUST_COMPLETE={shell}_complete" in result.output


def test_shell_that_is_not_known_is_wrong_usage() -> None:
    assert CliRunner().invoke(main.main, ["completion", "csh"]).exit_code == 2


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


@pytest.mark.parametrize("text", ["ENOSPC", "enospc", "No space left on device"])
def test_explain_knows_what_the_kernel_says_because_of_the_guard(text: str) -> None:
    result = CliRunner().invoke(main.main, ["explain", text])
    assert result.exit_code == 0
    for words in ("guard mount", "subPath", "runtimeClassName"):
        assert words in result.output
    assert "gRPC code" not in result.output


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
