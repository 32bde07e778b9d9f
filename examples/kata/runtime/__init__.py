"""The runtime: one daemon per node, which keeps sandboxes (one microVM each) and is crust's runtime handler.

    control   what a client asks: run a command, list, stop; JSON lines over a unix socket
    sandbox   one microVM, the volumes it has claimed, the containers that run in it
    volume    one volume in one sandbox: claim, hot-plug, mount; and all of it backwards
    sandboxes all of them: start, stop, adopt
    handler   what the proxy asks about volumes (statistics, expansion, health)
    ports     what all these need of virtual machines and the handoff; machines, handoff are the real ones
    daemon    the composition

A virtual machine outlives the daemon: it is a session of its own, and a daemon that starts adopts what runs.
"""
