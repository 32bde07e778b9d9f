"""Every name of an error in the code: the classes below `CrustError`, and what `<Branch>.named("…")` is raised with.

docs/errors.md has a row for each of crust; the tests compare the two.
"""

import ast
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from crust.core import errors
from crust.rpc import status

Kind = type[errors.CrustError]
_PACKAGES = {
    "crust": "crust",
    "crust_conformance": "conformance/crust_conformance",
    "examples": "examples",
}
"""Where each package is, below the checkout."""
BRANCHES = {branch.__name__: branch for branch in status.CODES}
ROOT = Path(__file__).parents[3]


def all_errors() -> tuple[Kind, ...]:
    """Every error class, by name; without `PeerStatus`, which has a peer's name."""
    for package in _PACKAGES:
        for module in pkgutil.walk_packages(
            importlib.import_module(package).__path__, f"{package}."
        ):
            if "__main__" not in module.name:
                importlib.import_module(module.name)
    ours = tuple(f"{package}." for package in _PACKAGES)
    kinds = {kind for kind in _below(errors.CrustError) if kind.__module__.startswith(ours)}
    kinds.discard(status.PeerStatus)
    return tuple(sorted(kinds, key=lambda kind: (kind.__name__, kind.__module__)))


def _below(kind: Kind) -> Iterator[Kind]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _below(subclass)


@functools.cache
def names() -> frozenset[tuple[str, Kind, bool]]:
    """Each name with its branch, and whether an example raises it."""
    of_classes = {
        (kind.__name__, status.branch_of(kind), kind.__module__.startswith("examples."))
        for kind in all_errors()
    }
    return named() | of_classes


@functools.cache
def named() -> frozenset[tuple[str, Kind, bool]]:
    """The errors that are named where they are raised. Fails where a name or its branch is no literal."""
    return frozenset(
        (name, branch, package == "examples")
        for package, place in _PACKAGES.items()
        for path in (ROOT / place).rglob("*.py")
        for name, branch in _raised(path)
    )


def _raised(path: Path) -> Iterator[tuple[str, Kind]]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case ast.Call(
                ast.Attribute(ast.Attribute(ast.Name("errors"), branch), "named"),
                [ast.Constant(str(name)), *_],
            ) if branch in BRANCHES:
                yield name, BRANCHES[branch]
            case ast.Call(ast.Attribute(attr="named")):
                pytest.fail(f"{path}:{node.lineno}: not of the form errors.<Branch>.named('…', …)")


def literal_hints() -> dict[str, list[str]]:
    """What to do, as errors of crust have it in a literal where they are named, or in their class: by name."""
    hints: dict[str, list[str]] = {}
    for path in (ROOT / "crust").rglob("*.py"):
        for name, call in _composed(ast.parse(path.read_bytes())):
            for keyword in call.keywords:
                if keyword.arg == "hint" and isinstance(keyword.value, ast.Constant):
                    hints.setdefault(name, []).append(str(keyword.value.value))
    return hints


def _composed(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """The calls that compose an error's message, with its name."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(attr="named"), [ast.Constant(str(name)), *_]):
                yield name, node
            case ast.ClassDef(name):
                for call in ast.walk(node):
                    match call:
                        case ast.Call(ast.Attribute(ast.Call(ast.Name("super")), "__init__")):
                            yield name, call
