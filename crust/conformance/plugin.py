"""The suite's pytest plugin: a CO for every case, skips by capability, and the report for the driver's author.

The report shows a case by its number and its rule, one line each, and no paths or function names of the suite.
"""

import inspect
from collections.abc import Generator, Iterator

import grpc
import pytest

from crust.conformance import capabilities, case
from crust.conformance.calls import Calls
from crust.conformance.co import Co
from crust.conformance.host_view import HostView
from crust.conformance.options import Options
from crust.rpc import channel
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc


class Plugin:
    """One run."""

    def __init__(self, options: Options, host: HostView) -> None:
        self._options = options
        self._host = host
        self._channel: grpc.Channel | None = None
        self._has: frozenset[str] = frozenset()
        self.failed: set[str] = set()
        self.passed: set[str] = set()
        self.skipped: dict[str, str] = {}
        self.is_driver_gone = False
        self._rules: dict[str, str] = {}
        self._numbers: set[str] = set()

    def pytest_configure(self, config: pytest.Config) -> None:
        """Declare the mark."""
        config.addinivalue_line("markers", f"{case.MARK}(number, needs): a numbered case")

    def pytest_sessionstart(self) -> None:
        """Ask the driver what it can do; a driver that does not answer ends the run."""
        target = channel.target_of(self._options.socket)
        options = [*channel.OPTIONS, ("grpc.default_authority", "localhost")]
        self._channel = grpc.insecure_channel(target, options=options)
        try:
            self._probe()
            self._has = capabilities.of(self._channel, self._options)
        except (AssertionError, grpc.RpcError) as error:
            pytest.exit(f"the driver at {self._options.socket} does not answer: {error}", 3)

    def _probe(self) -> None:
        """Probe, once the driver is there. Raises AssertionError if that takes too long."""
        assert self._channel is not None
        probe = csi_pb2_grpc.IdentityStub(self._channel).Probe
        Calls(self._options.timeout_s).until_final(probe, csi_pb2.ProbeRequest())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Close the connection; in an interrupted run, after the case has removed what it created."""
        if self._channel is not None:
            self._channel.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, obj: object) -> list[pytest.Item] | None:
        """Nothing for a case that is not asked for: making the items of all takes longer than most cases."""
        found = {mark.args[0] for mark in _marks(obj) if mark.name == case.MARK}
        self._numbers |= found
        is_unwanted = found and self._options.only and not found & set(self._options.only)
        return [] if is_unwanted else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Cases in the order of their numbers, and only those that are asked for."""
        items.sort(key=number)
        unknown = set(self._options.only) - self._numbers
        if unknown:  # a misspelt number would run nothing, and nothing would fail
            names = ", ".join(sorted(unknown))
            raise pytest.UsageError(f"no such case: {names}; docs/conformance.md lists them")
        self._rules = {number(each): rule(each) for each in items}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what the driver does not advertise."""
        item.user_properties.append((case.MARK, number(item)))
        missing = sorted(set(needs(item)) - self._has)
        if missing:
            why = ", ".join(missing)
            self.skipped[number(item)] = why
            pytest.skip(f"needs {why}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the result of each case."""
        name = _name(report)
        if report.failed:
            self.failed.add(name)
            self.passed.discard(name)
        elif report.when == "call" and report.passed:
            self.passed.add(name)
        elif report.when == "call" and report.skipped:
            self.skipped[name] = _why(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A failure's heading is the rule."""
        report = yield
        path, line, _ = report.location
        report.location = (path, line, f"{number(item)} {rule(item)}")
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """One line per case, and one more if what it created cannot be removed."""
        if report.when != "call" and report.passed:
            return None
        outcome = report.outcome if report.when == "call" or report.skipped else "error"
        return outcome, f"{_name(report)} {outcome}\n", outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """If a case crashed the driver, end the run: the other cases would all wait for it."""
        if number(item) not in self.failed:
            return
        try:
            self._probe()
        except AssertionError as error:
            self.is_driver_gone = True
            socket = self._options.socket
            item.session.shouldstop = f"the driver at {socket} does not answer any more: {error}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What was skipped and why, and what failed."""
        if self.skipped:
            terminalreporter.section("skipped: not advertised, or not given")
        for each, why in sorted(self.skipped.items()):
            terminalreporter.line(f"{each} needs {why}")
        if self.failed:
            terminalreporter.section("failed")
        for each in sorted(self.failed):
            terminalreporter.line(f"{each} {self._rules.get(each, '')}".rstrip())

    @pytest.fixture
    def co(self) -> Iterator[Co]:
        """A CO that removes what the case has created; what it cannot remove is an error of the case."""
        assert self._channel is not None
        co = Co(self._channel, self._has, self._options, self._host)
        yield co
        left = co.clean()
        assert not left, "not removed: " + "; ".join(left)


def number(item: pytest.Item) -> str:
    """The case's number."""
    mark = item.get_closest_marker(case.MARK)
    return str(mark.args[0]) if mark else ""


def rule(item: pytest.Item) -> str:
    """The case's rule, in one line."""
    text = inspect.getdoc(item.function) if isinstance(item, pytest.Function) else ""
    return " ".join((text or "").split())


def needs(item: pytest.Item) -> tuple[str, ...]:
    """What the case needs."""
    mark = item.get_closest_marker(case.MARK)
    return tuple(mark.args[1]) if mark else ()


def _marks(obj: object) -> list[pytest.Mark]:
    return getattr(obj, "pytestmark", []) if inspect.isfunction(obj) else []


def _name(report: pytest.TestReport) -> str:
    return str(dict(report.user_properties).get(case.MARK, report.nodeid))


def _why(report: pytest.TestReport) -> str:
    """The reason that a case gave to pytest.skip while it ran."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: needs ")
