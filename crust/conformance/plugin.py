"""The suite's pytest plugin: a CO for every case, skips by capability, and a result for every case.

pytest finds the cases, runs them and explains assertions; it prints nothing and decides nothing.
"""

import inspect
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import grpc
import pytest

from crust.conformance import case, inferred
from crust.conformance.options import Options
from crust.conformance.orchestrator.calls import Calls
from crust.conformance.orchestrator.co import Co
from crust.conformance.orchestrator.exchange import NONE, Exchange
from crust.conformance.orchestrator.host_view import HostView
from crust.conformance.results import Finding, Result, Results, explained
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver that is tested: a connection, and what it advertises."""

    channel: grpc.Channel
    has: frozenset[str]
    options: Options

    def probe(self) -> None:
        """Probe, once the driver is there. Raises AssertionError if that takes too long."""
        calls = Calls(self.options.timeout_s)
        calls.until_final(csi_pb2_grpc.IdentityStub(self.channel).Probe, csi_pb2.ProbeRequest())
        if self.options.controller_socket:  # its node part is another process
            info = csi_pb2_grpc.NodeStub(self.channel).NodeGetInfo
            calls.until_final(info, csi_pb2.NodeGetInfoRequest())


class Plugin:
    """One run. `said` is called with each result, and `remarked` with what holds for the whole run."""

    def __init__(
        self,
        driver: Driver,
        host: HostView,
        numbers: frozenset[str],
        said: Callable[[Result], None],
        remarked: Callable[[str], None],
    ) -> None:
        self._driver = driver
        self._host = host
        self._numbers = numbers
        self._said = said
        self._remarked = remarked
        self._inferred: inferred.Inferred | None = None
        self._findings: list[Finding] = []
        self._skipped = ""
        self._needs: frozenset[str] = frozenset()
        self._last: Callable[[], Exchange] = lambda: NONE
        self.results = Results()
        self.is_driver_gone = False

    def pytest_configure(self, config: pytest.Config) -> None:
        """Declare the mark."""
        config.addinivalue_line("markers", f"{case.MARK}(number, needs): a numbered case")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, obj: object) -> list[pytest.Item] | None:
        """Nothing for a case that is not asked for: making the items of all takes longer than most cases."""
        if not inspect.isfunction(obj) or not case.is_case(obj):
            return None
        return None if case.of(obj).number in self._numbers else []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """In the order of their numbers."""
        items.sort(key=lambda each: of(each).number)
        self._needs = frozenset(need for each in items for need in of(each).needs)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """A case from set-up to clean-up, and its result."""
        self._findings, self._skipped, self._last = [], "", lambda: NONE
        begun = time.monotonic()
        done = yield
        seconds = time.monotonic() - begun
        result = Result(of(item), tuple(self._findings), self._skipped, seconds)
        self.results.each.append(result)
        self._said(result)
        return done

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what the driver does not have."""
        missing = sorted(set(of(item).needs) - self._tried(of(item)).has)
        if missing:
            pytest.skip(", ".join(missing))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """What a failed assertion outside of the weaker blocks breaks is the case's own clause."""
        report = yield
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, pytest.skip.Exception):
            self._skipped = error.msg or ""
        elif error is not None:
            own = of(item).clause(of(item).strength)
            self._findings.append(Finding(own, explained(error), self._last()))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """If a case crashed the driver, end the run: the other cases would all wait for it."""
        if not self._findings:
            return
        try:
            self._driver.probe()
        except AssertionError as error:
            self.is_driver_gone = True
            where = self._driver.options.where
            self._remarked(f"the driver at {where} does not answer any more: {error}")
            item.session.shouldstop = "the driver does not answer"

    @pytest.fixture
    def co(self, request: pytest.FixtureRequest) -> Iterator[Co]:
        """A CO that removes what the case has created."""
        found, one = self._tried(of(request.node)), of(request.node)
        co = Co(self._driver.channel, found.has, found.options, self._host, one)
        self._last = lambda: co.last
        yield co
        self._findings = [*co.findings, *self._findings, *co.clean()]

    def _tried(self, one: case.Case) -> inferred.Inferred:
        """What is tried out is tried once, and only for a case that creates volumes."""
        if self._inferred is not None:
            return self._inferred
        driver = self._driver
        if case.CREATE not in one.needs:
            return inferred.Inferred(driver.options, driver.has)
        self._inferred = inferred.of(driver.channel, driver.has, driver.options, self._needs)
        for each in self._inferred.remarks:
            self._remarked(each)
        return self._inferred


def of(item: pytest.Item) -> case.Case:
    """The case of a pytest item."""
    assert isinstance(item, pytest.Function)
    return case.of(item.function)
