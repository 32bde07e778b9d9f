"""docs/errors.md, made from the code: every error class, its gRPC code, who retries, and what to do.

`python -m tests.support.pages.error_table` writes it again; a test holds the committed file against this.
"""

import sys

from crust.cli import explain
from crust.rpc import status

HEAD = """# Errors

Every error has a name. It begins the message (`[MountFailed] …`), is `error_name` in the log, and `reason` of
google.rpc.ErrorInfo (domain `crust.dev`) in the gRPC status details of crust.v1. CSI keeps the details empty, so a
CSI call has them only if its caller sends `crust-extensions: error-info`. Find the name below, or ask
`crust explain MountFailed`. The message says what failed, why, and what to do. The *branch* (a heading below) says
who retries, and gives the gRPC status code. Two calls answer some errors with UNAVAILABLE instead (specs/deferral.md,
D-36 and D-37): a NodePublishVolume of which something exists, and RuntimeExpandVolume where a retry helps.

An error that passes several processes of crust keeps its first name. A wrapped driver's own status passes unchanged,
without a name of ours. A failure that is none of these is a bug: `UnexpectedError` with a request id, under which
the log of that process has the reason.

Errors of the example runtime are marked *example*. This page is made from the code:
`python -m tests.support.pages.error_table > docs/errors.md`.
"""


def all_errors() -> tuple[explain.Kind, ...]:
    """Every error class of crust and of the example runtime, by name."""
    explain.load("crust")
    explain.load("examples")
    return explain.all_errors()


def render() -> str:
    """The page."""
    kinds = all_errors()
    lines = [HEAD]
    for branch, code in status.CODES.items():
        lines += [f"## {branch.__name__}: `{code.name}`", "", explain.summary(branch)]
        lines += [f"Who retries: {branch.retried_by}. What to do: {branch.advice}.", ""]
        leaves = [
            each for each in kinds if explain.branch_of(each) is branch and each is not branch
        ]
        if leaves:
            lines += [
                "| error | what happened | what to do |",
                "|---|---|---|",
                *map(_row, leaves),
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def _row(leaf: explain.Kind) -> str:
    mark = " *example*" if leaf.__module__.startswith("examples.") else ""
    own = explain.what_to_do(leaf)
    advice = "" if own == leaf.advice else own
    return f"| `{leaf.__name__}`{mark} | {_cell(explain.summary(leaf))} | {_cell(advice)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
