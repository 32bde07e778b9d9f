"""`crust explain`: the page of an error, found by the name that a message, a log line or ErrorInfo shows.

All of it comes from the error's class, so that an installed crust explains its own version: the docstring says what
happened, the branch who retries, the `hint` that the constructor gives to its message what to do. docs/errors.md is
made from the same functions.
"""

import ast
import difflib
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator

import click

import crust
from crust import errors
from crust.rpc import status

Kind = type[errors.CrustError]


def run(name: str) -> None:
    """Print the page of the error `name`, in any case, with or without brackets.

    Raises click.UsageError for a name that no error has.
    """
    load(crust.__name__)
    kinds = {kind.__name__.lower(): kind for kind in all_errors()}
    wanted = name.strip("[]").lower()
    if wanted not in kinds:
        near = difflib.get_close_matches(wanted, kinds, n=1)
        suggestion = f": did you mean {kinds[near[0]].__name__}?" if near else ""
        raise click.UsageError(f"no error of crust is called {name!r}{suggestion}")
    click.echo(page(kinds[wanted]))


def page(kind: Kind) -> str:
    """What is known of an error, for a terminal."""
    branch = branch_of(kind)
    return "\n".join(
        (
            f"[{kind.__name__}]",
            "",
            *_paragraph("what happened", inspect.getdoc(kind) or ""),
            *_paragraph("gRPC code", status.code_of_class(kind).name),
            *_paragraph("kind", f"{branch.__name__}: {summary(branch)}"),
            *_paragraph("who retries", kind.retried_by),
            *_paragraph("what to do", what_to_do(kind)),
        )
    )


def load(package: str) -> None:
    """Import every module of `package`, so that all its errors are known.

    The cases of the conformance suite need pytest and define no error.
    """
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        name = module.name
        if not name.startswith(("crust.wire", "crust.conformance.")) and "__main__" not in name:
            importlib.import_module(name)
    importlib.import_module("crust.conformance.options")


_OURS = ("crust.", "examples.")


def all_errors() -> tuple[Kind, ...]:
    """Every error class of crust, and of its examples, in the modules that are loaded; by name."""
    found = {each for each in _below(errors.CrustError) if each.__module__.startswith(_OURS)}
    return tuple(sorted(found, key=lambda each: (each.__name__, each.__module__)))


def branch_of(kind: Kind) -> Kind:
    """The branch of `crust.errors` that gives an error its code."""
    return status.branch_of(kind)


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


def _paragraph(title: str, text: str) -> Iterator[str]:
    indent = " " * 16
    lines = textwrap.wrap(" ".join(text.split()), width=100 - len(indent))
    yield f"  {title:<14}{lines[0]}"
    yield from (f"{indent}{line}" for line in lines[1:])


def _below(kind: Kind) -> Iterator[Kind]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
