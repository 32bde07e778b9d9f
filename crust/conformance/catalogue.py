"""docs/conformance.md: how the suite is used, and every case with its rule, made from the code.

`python -m crust.conformance.catalogue > docs/conformance.md` writes it again; a test compares the file with this.
"""

import importlib
import inspect
import itertools
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

from crust.conformance import cases
from crust.conformance.case import MARK, needs_of, number_of
from crust.conformance.options import Parameters

HEAD = """# The conformance suite

    pip install 'crust-csi[conformance]'
    crust conformance --endpoint unix:///run/csi/csi.sock --target-root /var/lib/kubelet

checks any CSI driver on a socket against the rules of the specification. Run it where the driver's mounts are
visible: on the node, in the driver's mount namespace, as root. `--profile` says which CSI the driver speaks (1.12 or
1.13), `--only C-101` runs one case (repeat it for more), `--junit FILE` writes a report. A case is skipped only if it
needs a capability that the driver does not advertise, or an option that was not given; the end of the output lists
the skipped cases with the reason.
The suite removes what a case has created, also when the case fails or the run is ended (SIGINT, SIGTERM). It does not
touch other volumes. A driver that stops answering ends the run.

Exit codes: 0 no case failed, 1 some failed, 2 the command cannot be understood or was interrupted, 3 the driver does
not answer.

- `--log FILE`: the driver's log, which is searched for planted secrets.
- `--restart-command COMMAND`: kills the driver and starts it again; run with `sh -c`, returns when it is started,
  e.g. `'systemctl kill --signal=KILL my-driver; systemctl restart my-driver'`.
- `--parameters FILE`: TOML, any of these keys:

"""


def case_functions() -> Iterator[Callable[..., object]]:
    """Every case, by file and number."""
    for found in pkgutil.iter_modules(cases.__path__, f"{cases.__name__}."):
        yield from _of(importlib.import_module(found.name))


def render() -> str:
    """The page."""
    lines = [HEAD.rstrip(), ""]
    for name, text in _fields():
        lines.append(f"  - `{name}`: {text}")
    lines += ["", "## The cases", "", "| case | rule | needs |", "|---|---|---|"]
    rows = sorted((number_of(each), _rule(each), needs_of(each)) for each in case_functions())
    lines += [f"| {name} | {rule} | {_words(needs)} |" for name, rule, needs in rows]
    return "\n".join(lines) + "\n"


def _of(module: ModuleType) -> Iterator[Callable[..., object]]:
    for value in vars(module).values():
        marks = getattr(value, "pytestmark", ()) if callable(value) else ()
        if any(each.name == MARK for each in marks):
            yield value


def _fields() -> Iterator[tuple[str, str]]:
    """Fields have their documentation below them, where only the source has it."""
    lines = [line.strip() for line in inspect.getsource(Parameters).splitlines()]
    for line, after in itertools.pairwise(lines):
        if after.startswith('"""') and ": " in line:
            yield line.partition(":")[0], after.strip('"')


def _rule(function: Callable[..., object]) -> str:
    return " ".join((function.__doc__ or "").split()).replace("|", "\\|")


def _words(needs: tuple[str, ...]) -> str:
    return ", ".join(f"`{each}`" for each in needs)


if __name__ == "__main__":
    sys.stdout.write(render())
