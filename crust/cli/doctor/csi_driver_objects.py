"""The CSIDriver objects of the drivers on this node, where crust may read them."""

import asyncio
from collections.abc import Iterator

from crust.cli.doctor.finding import Finding, check, error, ok, warning
from crust.cli.doctor.node import Mismatches, Node
from crust.core.settings.loading import InvalidSettings
from crust.core.settings.proxy import KubernetesSettings, ProxySettings


@check("csidriver")
def fits_the_settings(node: Node) -> Iterator[Finding]:
    """attachRequired and podInfoOnMount of the CSIDriver objects go with the settings."""
    found = node.proxy_settings()
    if found is None or found.kubernetes is None or node.csi_driver_mismatches is None:
        return
    for name, mismatches in node.csi_driver_mismatches(found).items():
        for each in mismatches:
            yield (error if each.is_fatal else warning)(each.what, each.why, each.todo)
        if not mismatches:
            yield ok(f"CSIDriver {name} goes with the settings")


def mismatches(settings: ProxySettings) -> Mismatches:
    """Ask the Kubernetes API and the drivers. Raises `KubernetesApiUnavailable`. Blocks."""
    assert settings.kubernetes is not None
    return asyncio.run(_mismatches(settings, settings.kubernetes))


async def _mismatches(settings: ProxySettings, kubernetes: KubernetesSettings) -> Mismatches:
    try:
        from crust.cli.doctor import csi_driver_check
        from crust.kubernetes_api import api
    except ImportError as missing:
        raise InvalidSettings(
            "proxy", "kubernetes is set, and its client is missing: install crust-csi[kubernetes]"
        ) from missing
    from crust.rpc.port import SocketPort

    client = api.client(kubernetes.kubeconfig)
    try:
        found = {}
        for served in settings.drivers:
            async with SocketPort(served.socket) as driver:
                found[served.name] = await csi_driver_check.mismatches(client, served, driver)
        return found
    finally:
        await client.close()
