"""The one runner of both suites, on pytest: a subject for every case, skips by capability, and a result for each.

pytest finds the cases, runs them and explains assertions. It neither prints nor decides about results, because a
finding is no failed test: a case can break several clauses, it continues after a weaker clause, and an object that
could not be removed after the case is a finding as well.
"""

import inspect
import os
import re
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import click
import pytest

from crust_conformance import catalogue, comparisons
from crust_conformance.catalogue import Case
from crust_conformance.options import RunOptions
from crust_conformance.report import Report, write_json, write_junit
from crust_conformance.results import Exchange, Finding, Outcome, Result, Results, explained

_FILES = "_cases.py"
_INTERRUPTED = 2
GONE = 3
_FAILING: frozenset[Outcome] = frozenset({"failed"})
_FAILING_STRICT: frozenset[Outcome] = frozenset({"failed", "warning", "note"})


class Gone(Exception):
    """The tested program does not answer any more, and all other cases would wait for it."""


class Subject(Protocol):
    """The tested program: a driver, or a runtime."""

    def open(self) -> None:
        """Before the first case. Raises `Gone`."""

    def begin(
        self, case: Case, chosen: Collection[Case], remark: Callable[[str], None]
    ) -> Collection[str]:
        """Before a case: the needs of the case that the subject lacks. Raises `Gone`.

        `chosen` are the cases of the run; `remark` prints a remark about the whole run.
        """

    def using(self, case: Case, findings: list[Finding]) -> AbstractContextManager[Any]:
        """The argument of the case's function. The end removes the objects of the case, and adds findings.

        The end raises `Gone` if what it could not remove would fail other cases.
        """

    def call(self, case: Callable[[], Any]) -> None:
        """Run the case's function."""
        case()

    def last(self) -> Exchange:
        """The last exchange of the running case."""

    def end(self) -> None:
        """After a case with a finding. Raises `Gone`."""
        return


class Plugin:
    """One run. The report prints each result at once."""

    def __init__(self, subject: Subject, chosen: Collection[Case], report: Report) -> None:
        self._subject = subject
        self._chosen = {case.number: case for case in chosen}
        self._report = report
        self._findings: list[Finding] = []
        self._skipped = ""
        self.results = Results()
        self.is_gone = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, name: str, obj: object) -> list[pytest.Item] | None:
        """Make no item for a case that is not chosen: making all items takes longer than most cases."""
        is_left_out = inspect.isfunction(obj) and catalogue.number_of(name) not in self._chosen
        return [] if is_left_out else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the cases by number."""
        items.sort(key=lambda item: self._of(item).number)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run a case from set-up to clean-up, and report its result."""
        self._findings, self._skipped = [], ""
        begun = time.monotonic()
        done = yield
        seconds = time.monotonic() - begun
        result = Result(self._of(item), tuple(self._findings), self._skipped, seconds)
        self.results.cases.append(result)
        self._report.result(result)
        return done

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a case if the subject lacks one of its needs."""
        missing: list[str] = []
        with self._ending(item):
            missing = sorted(
                self._subject.begin(self._of(item), self._chosen.values(), self._report.remark)
            )
        if missing or self.is_gone:
            pytest.skip(", ".join(missing) or "an answer")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        """Call the case: a case for runtimes is a coroutine."""
        (name,) = inspect.signature(pyfuncitem.obj).parameters
        self._subject.call(partial(pyfuncitem.obj, pyfuncitem.funcargs[name]))
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note a finding: an assertion outside of the weaker blocks breaks the case's own clause."""
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, pytest.skip.Exception):
            self._skipped = error.msg or ""
        elif error is not None:
            clause = self._of(item).clauses[0]
            self._findings.append(Finding(clause, explained(error), self._subject.last()))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str]:
        """The words of a failed comparison."""
        return [comparisons.in_words(op, left, right)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """If a case crashed the subject, end the run."""
        if self._findings:
            with self._ending(item):
                self._subject.end()

    @pytest.fixture
    def co(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        """A CO, for a case that tests a driver; it removes the objects of the case."""
        yield from self._used(request)

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        """The runtime and its volumes, for a case that tests a runtime."""
        yield from self._used(request)

    def has_cases_in(self, text: str) -> bool:
        """Whether a file has a chosen case: an import of all files takes longer than most runs."""
        functions = re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE)
        return any(catalogue.number_of(name) in self._chosen for name in functions)

    def _used(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        case_findings: list[Finding] = []
        using = self._subject.using(self._of(request.node), case_findings)
        with self._ending(request.node), using as used:
            yield used
            self._findings = [*case_findings, *self._findings]
            case_findings.clear()
        self._findings += case_findings

    @contextmanager
    def _ending(self, item: pytest.Item) -> Iterator[None]:
        try:
            yield
        except Gone as gone:
            self.is_gone = True
            self._report.remark(str(gone))
            item.session.shouldstop = "the subject does not answer"

    def _of(self, item: pytest.Item) -> Case:
        return self._chosen[catalogue.number_of(item.name)]


def run_cases(
    subject: Subject, directory: Path, kind: str, options: RunOptions, report: Report
) -> Results:
    """Run the cases of a kind ("C", "R") in the directory. Raises `errors.InvalidRequest` for an unknown case."""
    cases = catalogue.cases(kind)
    numbers = catalogue.chosen(cases, options.only, options.skip, options.focus)
    plugin = Plugin(subject, [cases[number] for number in numbers], report)
    try:
        subject.open()
    except Gone as gone:
        click.echo(str(gone), err=True)
        return Results(exit_code=GONE)
    files = [str(file) for file in _files(directory) if plugin.has_cases_in(file.read_text())]
    with _no_settings_of_others():  # without any file, pytest would look in this directory
        ended = pytest.main([*(files or [str(directory)]), *_ARGUMENTS], plugins=[plugin])
    results = plugin.results
    report.summary(results, strict=options.strict)
    failing = _FAILING_STRICT if options.strict else _FAILING
    results.exit_code = GONE if plugin.is_gone else _exit_code(int(ended), results, failing)
    if options.junit is not None:
        write_junit(options.junit, results, failing)
    if options.json is not None:
        write_json(options.json, results)
    return results


def _files(directory: Path) -> Iterator[Path]:
    """The files with cases. Raises `OSError`: cases that are not found would not be run."""
    for path in directory.iterdir():
        if path.name.endswith(_FILES):
            yield path
        elif not path.suffix:  # a package
            yield from _files(path)


def _exit_code(ended: int, results: Results, failing: frozenset[Outcome]) -> int:
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return _INTERRUPTED
    return int(bool(results.numbers(*failing)))


@contextmanager
def _no_settings_of_others() -> Iterator[None]:
    """Hide pytest's options and plugins in the environment, which are for other tests."""
    theirs = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith("PYTEST_")}
    try:
        yield
    finally:
        os.environ.update(theirs)


_ARGUMENTS = [
    f"--rootdir={Path(__file__).parent}",
    f"--config-file={os.devnull}",
    f"--override-ini=python_files=*{_FILES}",
    "--noconftest",
    "--import-mode=importlib",
    "--disable-plugin-autoload",
    "--capture=no",
    "-pno:cacheprovider",
    "-pno:terminal",
    # they search all objects for warnings, which no terminal would show
    "-pno:unraisableexception",
    "-pno:threadexception",
]
