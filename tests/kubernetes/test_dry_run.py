"""Each object of the chart's forms, asked of an API server: also those that no test of a node installs.

The definitions of snapshots and of the Prometheus operator are theirs. An unknown field is refused.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import capabilities, chart
from tests.support.chart_forms import FORMS
from tests.support.kubernetes.control_plane import ControlPlane
from tests.support.kubernetes.kubectl import Kubectl


@pytest.fixture(scope="module")
def admin() -> Iterator[Kubectl]:
    capabilities.need("kubernetes")
    with tempfile.TemporaryDirectory(prefix="k-") as directory:
        plane = ControlPlane(Path(directory), port=8444, etcd_port=13379)
        with plane.api_running():
            plane.define("snapshots", "monitoring")
            plane.admin.run("create", "namespace", chart.NAMESPACE)
            yield plane.admin


@pytest.mark.parametrize("form", FORMS)
def test_api_server_takes_each_object_of_the_chart(admin: Kubectl, form: str) -> None:
    asked = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-")
    answers = admin.run(*asked, given=chart.text(FORMS[form])).splitlines()
    assert len(answers) == len(chart.objects(FORMS[form]))
    assert all(line.endswith(" serverside-applied (server dry run)") for line in answers)
