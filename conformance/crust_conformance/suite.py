"""The suite for drivers: connects to the driver, asks for its capabilities, and runs the cases that fit."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from crust.wire.csi.v1 import csi_pb2
from crust_conformance import plugin, report
from crust_conformance.catalogue import Case
from crust_conformance.options import Options
from crust_conformance.orchestrator import capabilities
from crust_conformance.orchestrator.calls import Calls, Channels, connected
from crust_conformance.orchestrator.capabilities import CREATE
from crust_conformance.orchestrator.co import Co
from crust_conformance.orchestrator.host_view import HostView
from crust_conformance.results import Exchange, Finding, Results

CASES = Path(__file__).parent / "cases"


def run_suite(options: Options, host: HostView | None = None, *, quiet: bool = False) -> Results:
    """Run the cases against the driver. Raises `errors.InvalidRequest` for an unknown case."""
    with connected(options.socket, options.controller_socket) as channels:
        driver = DriverSubject(channels, options, host or HostView())
        return plugin.run_cases(driver, CASES, "C", options, report.Report(quiet=quiet))


class DriverSubject(plugin.Subject):
    """The tested driver. Abilities without a capability are tried once, and only if a case creates volumes."""

    def __init__(self, channels: Channels, options: Options, host: HostView) -> None:
        self._channels = channels
        self._options = options
        self._host = host
        self._has: frozenset[str] = frozenset()
        self._is_tried = False
        self._co: Co | None = None

    def open(self) -> None:
        """Wait for the driver, and ask for its capabilities. Raises `plugin.Gone`."""
        self.end()
        try:
            self._has = capabilities.of_driver(self._channels, self._options)
        except AssertionError as error:
            raise self._gone(error) from None

    def begin(
        self, case: Case, chosen: Collection[Case], remark: Callable[[str], None]
    ) -> Collection[str]:
        """Before the first case that creates volumes, try the abilities without a capability."""
        self._co = None
        if CREATE in case.needs and not self._is_tried:
            self._is_tried = True
            needs = frozenset(need for chosen_case in chosen for need in chosen_case.needs)
            inferred = capabilities.inferred(self._channels, self._has, self._options, needs)
            self._has, self._options = inferred.has, inferred.options
            for text in inferred.remarks:
                remark(text)
        return set(case.needs) - self._has

    @contextmanager
    def using(self, case: Case, findings: list[Finding]) -> Iterator[Co]:
        """A CO that removes the objects of the case."""
        self._co = co = Co(self._channels, self._options, self._has, self._host, case)
        yield co
        findings += co.findings
        findings += co.clean()

    def last(self) -> Exchange:
        """The last call of its CO."""
        return self._co.last if self._co else Exchange()

    def end(self) -> None:
        """Probe, when the driver is back. Its node part may be another process."""
        calls = Calls(self._channels, self._options.timeout_s)
        try:
            calls.until_final(csi_pb2.ProbeRequest())
            if self._options.controller_socket:
                calls.until_final(csi_pb2.NodeGetInfoRequest())
        except AssertionError as error:
            raise self._gone(error) from None

    def _gone(self, error: AssertionError) -> plugin.Gone:
        return plugin.Gone(f"the driver at {self._options.sockets} does not answer: {error}")
