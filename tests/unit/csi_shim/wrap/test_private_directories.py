"""The names of the private directories."""

import re
from dataclasses import replace

from crust.core import volumes
from crust.csi_shim.wrap import private_directories
from crust.csi_shim.wrap.private_directories import PrivatePaths
from tests.support.wrapped_volume import KEY, PATHS


def test_private_directories_have_the_kubelets_form_and_nothing_else() -> None:
    above = "/var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices"
    assert PATHS.staging.startswith(f"{above}/staging/crust-")
    assert PATHS.published == PATHS.staging.replace("/staging/", "/publish/")
    leaf = PATHS.leaf("/var/lib/kubelet/pods/1/mount")
    assert leaf.startswith(f"{PATHS.published}/")
    names = [PATHS.staging.rpartition("/")[2], leaf.rpartition("/")[2]]
    assert [len(name) for name in names] == [46, 40]
    assert not any(word in leaf for word in ("pvc-", "globalmount", "/mount"))
    assert PrivatePaths.of("/var/lib/kubelet", KEY) == PATHS
    assert PATHS.leaf("/other") != leaf
    other = volumes.VolumeKey(volumes.DriverName("other"), KEY.volume_id)
    assert PrivatePaths.of("/var/lib/kubelet", other).staging != PATHS.staging
    assert private_directories.root("/k/") == "/k/plugins/kubernetes.io/csi/volumeDevices"
    one, two = (replace(KEY, volume_id=volumes.VolumeId(name)) for name in ("../\0c", "../c"))
    assert PrivatePaths.of("/k", one) != PrivatePaths.of("/k", two)
    hostile = PrivatePaths.of("/var/lib/kubelet", one)
    assert re.fullmatch(rf"{above}/staging/crust-[0-9a-f]{{40}}", hostile.staging)
    assert re.fullmatch(rf"{hostile.published}/[0-9a-f]{{40}}", hostile.leaf("/../../etc"))
