"""The registry of the checks."""

from collections.abc import Callable, Iterator

from crust.cli.doctor.finding import Finding
from crust.cli.doctor.node import Node

DoctorCheck = Callable[[Node], Iterator[Finding]]

CHECKS: dict[str, DoctorCheck] = {}
"""The checks by name, in the order in which they run."""


def doctor_check(name: str) -> Callable[[DoctorCheck], DoctorCheck]:

    def register(function: DoctorCheck) -> DoctorCheck:
        CHECKS[name] = function
        return function

    return register
