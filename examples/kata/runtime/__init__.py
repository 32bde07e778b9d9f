"""The runtime: one daemon per node, which keeps sandboxes (one microVM each) and is crust's runtime handler.

    control   the clients' socket: run a command, list, stop; JSON lines
    sandbox   one microVM, the volumes that it has claimed, and its containers
    volume    one volume in one sandbox: claim, hot-plug, mount, and the same steps undone
    sandboxes all sandboxes: start, stop, adopt
    handler   the proxy's calls about volumes: statistics, expansion, health, freeze, limits
    ports     Protocols for VMs and the handoff directory; daemon and handoff implement them
    daemon    the composition

A VM outlives the daemon: it runs in a session of its own, and a daemon that starts adopts the VMs that run.
"""
