"""Each MUST of CSI has a case, or a reason why none can test it; each case for a MUST stands there."""

import re

from crust_conformance import catalogue
from crust_conformance.catalogue import Strength
from tests.support.pages import csi_musts

CASES = catalogue.cases("C")
OF_CSI_1_12 = {"C-138", "C-139", "C-244"}
"""Of what CSI 1.13 removed: the page says so above its tables."""


def test_each_row_has_cases_or_a_reason() -> None:
    for row in csi_musts.rows():
        if not row.cases:
            assert row.tested_by.startswith(csi_musts.WITHOUT_A_CASE), row
        assert set(row.cases) <= set(CASES), row


def test_row_without_a_case_of_a_must_says_why() -> None:
    for row in csi_musts.rows():
        strengths = {CASES[case].strength for case in row.cases}
        if strengths and Strength.MUST not in strengths:
            assert re.search(r" \(a (warning|note): .+\)$", row.tested_by), row


def test_each_case_of_a_must_stands_in_a_row() -> None:
    musts = {case.number for case in CASES.values() if case.strength is Strength.MUST}
    assert musts - {case for row in csi_musts.rows() for case in row.cases} == OF_CSI_1_12
