"""docs/errors.md, made from the code: every error class, its gRPC code, who retries, and what to do.

The docstring says what happened, the branch who retries, the `hint` that the constructor gives to its message what to
do. `python -m tests.support.pages.error_table` writes the page again; a test holds the committed file against this.
`crust explain` prints from the page.
"""

import ast
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Iterator

from crust import errors
from crust.rpc import status

Kind = type[errors.CrustError]

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


def all_errors() -> tuple[Kind, ...]:
    """Every error class of crust and of its examples, by name."""
    for package in ("crust", "examples"):
        for module in pkgutil.walk_packages(
            importlib.import_module(package).__path__, f"{package}."
        ):
            if "__main__" not in module.name:
                importlib.import_module(module.name)
    ours = ("crust.", "examples.")
    found = {each for each in _below(errors.CrustError) if each.__module__.startswith(ours)}
    return tuple(sorted(found, key=lambda each: (each.__name__, each.__module__)))


def _below(kind: Kind) -> Iterator[Kind]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)


def summary(kind: Kind) -> str:
    """The first line of the docstring."""
    return (inspect.getdoc(kind) or "").splitlines()[0]


def what_to_do(kind: Kind) -> str:
    """The hint of the error's own message if it is the same each time or mostly, else the branch's advice."""
    if "__init__" not in vars(kind):
        return kind.advice
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            usual = node.value.values[-1] if isinstance(node.value, ast.BoolOp) else node.value
            if isinstance(usual, ast.Constant):
                return str(usual.value)
    return kind.advice


def render() -> str:
    """The page."""
    kinds = all_errors()
    lines = [HEAD]
    for branch, code in status.CODES.items():
        lines += [f"## {branch.__name__}: `{code.name}`", "", summary(branch)]
        lines += [f"Who retries: {branch.retried_by}. What to do: {branch.advice}.", ""]
        leaves = [each for each in kinds if status.branch_of(each) is branch and each is not branch]
        if leaves:
            lines += [
                "| error | what happened | what to do |",
                "|---|---|---|",
                *map(_row, leaves),
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def _row(leaf: Kind) -> str:
    mark = " *example*" if leaf.__module__.startswith("examples.") else ""
    own = what_to_do(leaf)
    advice = "" if own == status.branch_of(leaf).advice else own
    return f"| `{leaf.__name__}`{mark} | {_cell(summary(leaf))} | {_cell(advice)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(render())
