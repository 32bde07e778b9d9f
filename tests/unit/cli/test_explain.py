"""`crust explain`, which asks no daemon."""

import click
import pytest
from click.testing import CliRunner

from crust.cli import explain, main

MOUNT_FAILED = (
    "INTERNAL",
    "RuntimeFailed",
    "the kernel could not mount",
    "who retries",
    "what to do",
)

GUARD = ("guard mount", "subPath", "runtimeClassName")


@pytest.mark.parametrize(
    ("words", "code", "shown", "not_shown"),
    [
        (["completion", "csh"], 2, ("Invalid value",), "Traceback"),
        (["explain", "MountFailed"], 0, MOUNT_FAILED, "did you mean"),
        (["explain", "mountfailed"], 0, MOUNT_FAILED, "did you mean"),
        (["explain", "[MountFailed]"], 0, MOUNT_FAILED, "did you mean"),
        (["explain", "ENOSPC"], 0, GUARD, "gRPC code"),
        (["explain", "enospc"], 0, GUARD, "gRPC code"),
        (["explain", "No space left on device"], 0, GUARD, "gRPC code"),
        (["explain", "MountFaild"], 2, ("did you mean MountFailed?",), "[MountFailed]"),
        (["explain", "qqqqqqqq"], 2, ("no error of crust is called 'qqqqqqqq'",), "did you mean"),
    ],
)
def test_command_that_asks_no_daemon_answers(
    words: list[str], code: int, shown: tuple[str, ...], not_shown: str
) -> None:
    result = CliRunner().invoke(main.main, words)
    missing = [text for text in shown if text not in result.output]
    assert (result.exit_code, missing, not_shown in result.output) == (code, [], False)


def test_table_of_errors_that_is_damaged_is_refused_by_name() -> None:
    with pytest.raises(click.ClickException, match="cannot be read: '## Damaged' is no branch"):
        list(explain.pages("## Damaged\n"))
