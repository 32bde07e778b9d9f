"""`crust ceph` on a real cluster: the claims of a pool, and a node that is declared gone."""

import pytest
from click.testing import CliRunner

from crust.ceph import claim_object, fencing
from crust.cli.main import main
from examples.cluster.ceph_cluster import POOL
from tests.support.ceph.image_claims import IMAGE, A, Bench, attached, take


def run(bench: Bench, *words: str, key: str | None = None) -> tuple[int, str]:
    """Exit code and output of a command of the controller's user."""
    user = f"operator-{bench.namespace}"
    own = bench.ceph.controller(user, bench.namespace)
    where = ("--monitors", bench.ceph.monitors, "--user", user, "--pool", POOL)
    argv = ["ceph", words[0], *where, "--namespace", bench.namespace, *words[1:]]
    done = CliRunner().invoke(main, argv, input=f"{own if key is None else key}\n")
    return done.exit_code, done.output


def test_claims_are_listed_with_node_sandbox_and_client(bench: Bench) -> None:
    client = bench.node()
    attached(client, A)
    code, output = run(bench, "claims")
    assert code == 0
    assert f"{IMAGE}  writer  node node-a  sandbox sandbox-1  {client.address}" in output


@pytest.mark.spec("H-53")
def test_connected_node_is_fenced_only_if_the_operator_insists(bench: Bench) -> None:
    client = bench.node()
    attached(client, A)
    code, output = run(bench, "fence", "node-a")
    assert (code, "[HolderConnected]" in output) == (1, True)
    code, output = run(bench, "fence", "node-a", "--even-if-connected")
    assert (code, output) == (0, f"{IMAGE}: free; blocklisted {client.address}\n")
    assert claim_object.read(bench.controller().ioctx, IMAGE).cookie == ""


@pytest.mark.parametrize("where", [(), ("--image", IMAGE)])
def test_node_without_a_claim_names_the_others(bench: Bench, where: tuple[str, ...]) -> None:
    take(bench.node(), A)
    code, output = run(bench, "fence", "node-z", *where)
    assert (code, "[NodeWithoutClaim]" in output, "node-a" in output) == (1, True, True)


def test_fencing_that_was_interrupted_is_repeated(bench: Bench) -> None:
    client, controller = bench.node(), bench.controller()
    attached(client, A)
    before = claim_object.read(controller.ioctx, IMAGE)
    ended = fencing.with_ended(before.claims, before.claims.holders)
    assert claim_object.swap(controller.ioctx, IMAGE, before, ended)
    code, output = run(bench, "fence", "node-a")
    assert (code, output) == (0, f"{IMAGE}: free; blocklisted {client.address}\n")


def test_wrong_key_is_an_error_and_not_shown(bench: Bench) -> None:
    code, output = run(bench, "claims", key="AQD0000000000000000000000000000000000000==")
    assert code == 1
    assert "[CephKeyRefused]" in output
    assert "AQD0000" not in output


def test_command_without_a_key_is_not_understood(bench: Bench) -> None:
    code, output = run(bench, "claims", key="")
    assert code == 2
    assert "standard input" in output


def test_capabilities_of_one_volume_are_printed_for_ceph_auth(bench: Bench) -> None:
    code, output = run(bench, "caps", IMAGE)
    assert code == 0
    key = bench.ceph.user(f"volume-{bench.namespace}", {"mon": "allow r", "osd": output.strip()})
    with bench.client(f"volume-{bench.namespace}", key).open() as image:
        image.write(b"mine", 0)


def test_capabilities_of_a_volume_that_is_not_there_are_an_error(bench: Bench) -> None:
    code, output = run(bench, "caps", "vol-2")
    assert (code, "[CephImageMissing]" in output) == (1, True)
