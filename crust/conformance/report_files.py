"""The reports for machines: JUnit XML, in which only what fails the run is a failure, and JSON with everything."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from crust.conformance.results import Finding, Outcome, Result, Results


def write_junit(path: Path, results: Results, failing: Iterable[Outcome]) -> None:
    """One testcase for each case; a finding that does not fail the run is its output."""
    failing = frozenset(failing)
    failures = sum(each.outcome in failing for each in results.each)
    skipped = sum(each.outcome == "skipped" for each in results.each)
    suite = ElementTree.Element("testsuite", name="crust conformance", errors="0")
    suite.set("tests", str(len(results.each)))
    suite.set("failures", str(failures))
    suite.set("skipped", str(skipped))
    suite.set("time", f"{sum(each.seconds for each in results.each):.3f}")
    for each in results.each:
        suite.append(_testcase(each, failing))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def write_json(path: Path, results: Results) -> None:
    """Every case with its clauses and findings."""
    found = {"exit_code": results.exit_code, "cases": [_described(each) for each in results.each]}
    path.write_text(json.dumps(found, ensure_ascii=False, indent=2) + "\n")


def _testcase(result: Result, failing: frozenset[Outcome]) -> ElementTree.Element:
    case = ElementTree.Element("testcase", name=f"{result.case.number} {result.case.rule}")
    case.set("classname", f"conformance.{result.case.strength}")
    case.set("time", f"{result.seconds:.3f}")
    properties = ElementTree.SubElement(case, "properties")
    ElementTree.SubElement(properties, "property", name="case", value=result.case.number)
    text = "\n\n".join(map(_text, result.findings))
    if result.outcome == "skipped":
        ElementTree.SubElement(case, "skipped", message=f"needs {result.skipped}")
    elif result.outcome in failing:
        ElementTree.SubElement(case, "failure", message=_xml(result.findings[0].why)).text = text
    elif text:
        ElementTree.SubElement(case, "system-out").text = f"{result.outcome}: {text}"
    return case


def _described(result: Result) -> dict[str, Any]:
    return {
        "number": result.case.number,
        "rule": result.case.rule,
        "strength": str(result.case.strength),
        "clauses": [str(each) for each in result.case.clauses],
        "outcome": result.outcome,
        "skipped": result.skipped,
        "seconds": round(result.seconds, 3),
        "findings": [
            {
                "clause": str(each.clause),
                "sent": each.exchange.sent,
                "got": each.exchange.got,
                "why": each.why,
            }
            for each in result.findings
        ],
    }


def _text(finding: Finding) -> str:
    sent = f"sent: {finding.exchange.sent}\ngot: {finding.exchange.got}\n"
    return _xml(f"{finding.clause}\n{sent if finding.exchange.sent else ''}but: {finding.why}")


def _xml(text: str) -> str:
    """XML cannot have the control characters that some cases send."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
