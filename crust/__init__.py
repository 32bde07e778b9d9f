"""crust, Container RUntime STorage: hands the block device of a CSI volume to a microVM runtime.

proxy, csi_shim, runtime_handler, handoff, kata       deferral
blockdriver                                           our CSI driver
cli, node                                             the programs
core, host, rpc, wire, kubernetes_api, inspection     what all of these use
"""

from crust._version import __version__ as __version__
