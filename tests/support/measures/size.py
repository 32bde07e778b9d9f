"""Count lines and error classes of this checkout: `make size`.

Counted are the Python files that git knows, without generated code. Kata's part is counted apart: crust/kata, and
every file of tests/ and examples/ whose path names Kata. Blank lines and comments count.
"""

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GENERATED = "crust/wire/"


@dataclass
class ErrorClasses:
    """The subclasses of `CrustError` in crust/, and what crust/ and examples/ do with them by name.

    A class that sets `answered_as` counts as caught: the table of status codes depends on the class.
    """

    bases: dict[str, list[str]] = field(default_factory=dict)
    constructed: Counter[str] = field(default_factory=Counter)
    caught: set[str] = field(default_factory=set)

    def read(self, tree: ast.Module, *, declares: bool) -> None:
        """Add one file's; with `declares` its classes count too."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and declares:
                self._declare(node)
            elif isinstance(node, ast.ExceptHandler) and node.type is not None:
                self.caught.update(_names(node.type))
            elif isinstance(node, ast.Tuple):  # a name for several classes, or the handler's own
                self.caught.update(map(_name, node.elts))
            elif isinstance(node, ast.Call):
                self.constructed[_name(node.func)] += 1
                if isinstance(node.func, ast.Attribute):  # a class method that constructs
                    self.constructed[_name(node.func.value)] += 1
                if _name(node.func) in ("isinstance", "issubclass", "suppress"):
                    self.caught.update(_names(*node.args))

    def _declare(self, node: ast.ClassDef) -> None:
        self.bases[node.name] = [_name(base) for base in node.bases]
        assigned = [part.targets for part in node.body if isinstance(part, ast.Assign)]
        if any("answered_as" in _names(*targets) for targets in assigned):
            self.caught.add(node.name)

    def names(self) -> set[str]:
        """`CrustError` and all classes below it."""
        errors = {"CrustError"}
        while below := {
            name for name, bases in self.bases.items() if errors & {*bases} and name not in errors
        }:
            errors |= below
        return errors - {"CrustError"}

    def raised_once_uncaught(self) -> set[str]:
        """Classes without a subclass that one place at most constructs and no handler names."""
        with_subclass = {base for bases in self.bases.values() for base in bases}
        return {
            name
            for name in self.names() - self.caught - with_subclass
            if self.constructed[name] <= 1
        }


def python_files(directory: str) -> Iterator[str]:
    """The paths of a directory's files below the root, as git lists them."""
    command = ("git", "ls-files", "--", f"{directory}/*.py")
    for path in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        if not path.startswith(GENERATED) and (ROOT / path).exists():
            yield path


def lines(directory: str) -> tuple[Counter[str], int]:
    """Lines by package (a file of the top level: ""), and the lines of Kata, which are in no package's figure."""
    packages: Counter[str] = Counter()
    kata = 0
    for path in python_files(directory):
        count = (ROOT / path).read_bytes().count(b"\n")
        if "kata" in path:
            kata += count
        else:
            _, package, *below = path.split("/")
            packages[package if below else ""] += count
    return packages, kata


def error_classes() -> ErrorClasses:
    """Those of the whole checkout."""
    classes = ErrorClasses()
    for directory in ("crust", "examples"):
        for path in python_files(directory):
            classes.read(ast.parse((ROOT / path).read_bytes()), declares=directory == "crust")
    return classes


def main() -> None:
    """Print the figures."""
    for directory in ("crust", "tests", "examples"):
        packages, kata = lines(directory)
        print(f"{directory + '/':24}{packages.total():7,}  lines; Kata's part {kata:,}")
        for package, count in packages.most_common():
            print(f"  {package or '(top level)':22}{count:7,}")
    classes = error_classes()
    print(f"{'error classes':24}{len(classes.names()):7,}")
    print(f"  raised at one place and caught by nobody: {len(classes.raised_once_uncaught()):,}")


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _names(*nodes: ast.expr) -> set[str]:
    return {
        _name(part)
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Name | ast.Attribute)
    }


if __name__ == "__main__":
    main()
