"""What `crust doctor` says of a real etcd."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from crust.cli.doctor import etcd as checked
from crust.cli.doctor import run
from crust.cli.doctor.finding import Level
from crust.cli.doctor.node import Node
from examples.cluster.authority import DAY
from examples.cluster.etcd import Etcd


@pytest.fixture(scope="module")
def unprotected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """A member whose access control nobody has enabled."""
    etcd = Etcd(tmp_path_factory.mktemp("open"))
    try:
        etcd.start()
        etcd.wait_ready()
        yield etcd
    finally:
        etcd.stop()


def found(etcd: Etcd, user: str, node: str = "n1", *, is_node: bool = True) -> dict[str, Level]:
    """What is said for this certificate, to how bad it is."""
    said = checked.findings(etcd.settings(user), node, is_node=is_node)
    return {each.what: each.level for each in said}


def level_of(said: dict[str, Level], words: str) -> Level:
    """How bad the one finding is that has these words."""
    (level,) = (level for what, level in said.items() if words in what)
    return level


def test_protected_etcd_is_fine_but_for_the_holes_of_its_version(etcd: Etcd) -> None:
    said = found(etcd, "n1")
    assert level_of(said, "n1 may read its part of etcd, and not the rest") is Level.OK
    assert level_of(said, "the certificate of n1 for etcd is valid until") is Level.OK
    assert level_of(said, "127.0.0.1") is Level.OK
    assert level_of(said, "GHSA-xg4h-6gfc-h4m8") is Level.WARNING
    assert len(said) == 4
    said = found(etcd, "controller", is_node=False)
    assert level_of(said, "controller may read its part of etcd, and not the rest") is Level.OK


def test_etcd_without_access_control_is_an_error(unprotected: Etcd) -> None:
    assert level_of(found(unprotected, "n1"), "n1 may read all of etcd") is Level.ERROR


def test_check_of_doctor_takes_the_settings_of_the_driver(etcd: Etcd, tmp_path: Path) -> None:
    given = etcd.settings("n1")
    table = "\n".join(f"{key} = {json.dumps(value)}" for key, value in given.model_dump().items())
    text = f'socket = "/s"\nmode = "node"\nnode_id = "n1"\n[cluster]\n{table}\n'
    file = tmp_path / "etc" / "crust" / "driver.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    said = run.findings(Node(root=tmp_path), ("etcd",))
    assert {each.check for each in said} == {"etcd"}
    assert "n1 may read its part of etcd, and not the rest" in [each.what for each in said]


def test_certificates_of_others_are_errors(etcd: Etcd) -> None:
    said = found(etcd, "n2", node="n1")
    assert level_of(said, "n2 may not read what node n1 writes") is Level.ERROR
    said = found(etcd, "controller", node="n1")
    assert level_of(said, "controller may read what the controller writes") is Level.ERROR


@pytest.mark.parametrize(
    ("ends", "words", "level"),
    [
        (-timedelta(hours=1), "will be refused", Level.ERROR),
        (3 * DAY, "expires on", Level.WARNING),
    ],
)
def test_error_shows_the_dates_of_the_certificate(
    etcd: Etcd, ends: timedelta, words: str, level: Level
) -> None:
    user = f"n1-{ends.days}"
    etcd.files(user)
    etcd.authority.files(user, etcd.authority.issue("n1", begins=-2 * DAY, ends=ends))
    assert level_of(found(etcd, user), words) is level


def test_member_that_is_away_and_files_that_are_missing_are_errors(
    unprotected: Etcd, tmp_path: Path
) -> None:
    address = unprotected.members[0].address
    unprotected.stop()
    try:
        said = found(unprotected, "n1")
        assert level_of(said, f"etcd at {address} cannot be used") is Level.ERROR
        assert level_of(said, "access to etcd was not tried") is Level.ERROR
    finally:
        unprotected.start()
        unprotected.wait_ready()
