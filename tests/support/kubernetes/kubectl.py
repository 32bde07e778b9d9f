"""What tests ask the API server, by kubectl, as an operator does. Each wait is kubectl's own watch."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.support.kubernetes.daemons import PROGRAMS

Answer = TypeVar("Answer")

WITHIN_S = 180
"""It is only waited for in a failure."""


def until(asked: Callable[[], Answer], within_s: int = WITHIN_S) -> Answer:
    """Ask until the answer is not empty: for what kubectl cannot watch."""
    ends_s = time.monotonic() + within_s
    while not (answer := asked()):
        assert time.monotonic() < ends_s, f"not within {within_s} s: the answer is {answer!r}"
    return answer


@dataclass(frozen=True, slots=True)
class Kubectl:
    """One user of the cluster."""

    kubeconfig: Path
    within_s: int = WITHIN_S
    """How long a wait may take, at most."""

    def _run(self, arguments: tuple[str, ...], given: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            (str(PROGRAMS / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments),
            input=given, capture_output=True, text=True, timeout=2 * self.within_s, check=False,
        )  # fmt: skip

    def refusal(self, *arguments: str, given: Any = None) -> str:
        """Why the API server refuses it, which has a JSON object of its input; empty: it does not."""
        done = self._run(arguments, json.dumps(given))
        assert (done.returncode == 0) is (done.stderr == ""), done
        return done.stderr

    def run(self, *arguments: str, given: str = "", may_fail: bool = False) -> str:
        """The output."""
        done = self._run(arguments, given)
        assert may_fail or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def apply(self, *objects: Any) -> None:
        """Make objects, or change them."""
        self.run("apply", "--filename=-", given=_listed(objects))

    def delete(self, *objects: Any) -> None:
        """Delete them, and wait until they are gone."""
        self.run("delete", "--filename=-", given=_listed(objects))

    def get(self, kind: str, name: str, *arguments: str) -> Any:
        """An object."""
        return json.loads(self.run("get", kind, name, "--output=json", *arguments))

    def names(self, kind: str, *arguments: str) -> list[str]:
        """The names of the objects of a kind."""
        return self.run("get", kind, "--output=name", *arguments).split()

    def wait(self, condition: str, *what: str) -> None:
        """Wait until a condition of kubectl-wait holds; a failure shows the objects and what happened to them."""
        done = self.run(
            "wait", f"--for={condition}", f"--timeout={self.within_s}s", *what, may_fail=True
        )
        met = ("condition met", "deleted", "created")
        if not done.strip() or not all(line.endswith(met) for line in done.splitlines()):
            raise self._not_met(condition, what)

    def gone(self, *what: str) -> None:
        """Wait until objects, which are being deleted, are gone; some may be gone already."""
        if self._left(what):
            waited = ("wait", "--for=delete", f"--timeout={self.within_s}s", *what)
            self.run(*waited, may_fail=True)
            if self._left(what):
                raise self._not_met("delete", what)

    def _left(self, what: tuple[str, ...]) -> str:
        return self.run("get", "--ignore-not-found", "--output=name", *what)

    def _not_met(self, condition: str, what: tuple[str, ...]) -> AssertionError:
        """It shows the objects, and what happened to them."""
        shown = self.run("describe", *what, may_fail=True)
        events = self.run(
            "get", "events", "--all-namespaces", "--sort-by=.lastTimestamp", may_fail=True
        )
        of_crust = ("--namespace=crust-system", "--selector=app.kubernetes.io/name=crust-node")
        logs = self.run("logs", *of_crust, "--all-containers", "--tail=20", may_fail=True)
        texts = (shown, events[-6000:], logs)
        return AssertionError("\n".join((f"not {condition}: {what}", *texts)))

    def shell(self, pod: str, script: str) -> str:
        """The output of a script in a pod's first container."""
        return self.run("exec", pod, "--", "sh", "-ec", script).strip()


def _listed(objects: tuple[Any, ...]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
