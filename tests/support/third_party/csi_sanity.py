"""Runs csi-sanity, the suite that authors of CSI drivers know, as its authors released it.

`make third-party` builds it: csi_sanity.txt alone has its version.
"""

import re
import shlex
import subprocess
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).parents[3] / ".cache" / "csi-sanity" / "csi-sanity"
_PAGE = Path(__file__).parents[3] / "docs" / "conformance.md"
_TIMEOUT_S = 400


@dataclass(frozen=True, slots=True)
class Outcome:
    """The names of its cases, by what became of them; of those that failed, the message too."""

    passed: frozenset[str]
    skipped: frozenset[str]
    failed: Mapping[str, str]


def flags_of_page(mutable: Path) -> list[str]:
    """The flags of the page's call, without socket and directories; writes the file that the page describes."""
    text = _PAGE.read_text(encoding="utf-8")
    (call,) = re.findall(r"^    csi-sanity ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    (line,) = re.findall(r"^`mutable\.yaml` has one line, `(.*?)`", text, re.MULTILINE)
    mutable.write_text(f"{line}\n", encoding="utf-8")
    places = ("--csi.endpoint=", "--csi.mountdir=", "--csi.stagingdir=")
    words = shlex.split(call.replace("\\\n", " "))
    flags = [word for word in words if not word.startswith(places)]
    return [flag.replace("=mutable.yaml", f"={mutable}") for flag in flags]


def run(socket: str, directory: Path, *flags: str) -> Outcome:
    """Run all cases against the driver at a socket; its own files go below `directory`, which must exist."""
    report = directory / "junit.xml"
    done = subprocess.run(
        [
            PROGRAM,
            f"--csi.endpoint=unix://{socket}",
            f"--csi.mountdir={directory}/mount",
            f"--csi.stagingdir={directory}/staging",
            f"--csi.junitfile={report}",
            *flags,
        ],
        capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr
    by_status: defaultdict[str, set[str]] = defaultdict(set)
    failed: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, failure = case.attrib["name"], case.find("failure")
        if failure is not None:
            failed[name] = failure.attrib["message"]
        elif "[It]" in name:  # others are the set-up of the suite
            by_status[case.attrib["status"]].add(name)
    assert set(by_status) <= {"passed", "skipped", "pending"}, by_status.keys()
    # "pending" is what the suite's authors have switched off
    return Outcome(frozenset(by_status["passed"]), frozenset(by_status["skipped"]), failed)
