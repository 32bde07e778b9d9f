"""The CSI driver `block.csi.crust.dev`: block volumes of this machine, for hosts and for microVMs.

Rooms inside, top to bottom: `app` composes; `identity`, `controller`, `node` decode, call and encode; `provisioning`,
`staging`, `publishing`, `deferring`, `growth`, `usage` hold the rules and are called without a server;
`volume_records` (what volumes exist) and `node_state` (what is staged and published, void after a reboot) keep state;
`backends` holds the bytes. The truth is the disk and the kernel: a restart at any line reads both and carries on.

Staging attaches the device and makes sure of its filesystem; it mounts nothing. Whether the host mounts or a guest
does is decided by each publish, and never both at once. What the record does not prove new is never formatted.
"""
