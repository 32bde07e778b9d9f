"""`crust kata`: an unmodified Kata Containers consumes deferred volumes, under an unmodified containerd.

    mux, ttrpc    the two layers below NRI: frames, and calls in both directions
    nri           the plugin: which container the engine is about to create or start
    gate          which container may use which volume: everything that is refused, and why
    entry         Kata's own file for a volume: the real one, and the placeholder that names no device
    evidence      which process is a sandbox's virtual machine, and what Kata has attached to it; from there on in
                  go_runtime and rust_runtime, one for each of Kata's runtimes
    grants        the claim of a sandbox, its keeper, and the real entry for as long as a container needs it
    keeper_watch  keepers that were killed, and in shims machines whose shim was killed
    statistics    what the proxy asks of the guest, with one request of a sandbox at a time
    placeholders  a placeholder for each published volume, from the publish to the unpublish
    process       the daemon

Kata's entry names the device only while a container of the claiming sandbox is created and not yet started. At all
other times it names a device that does not exist, and Kata refuses the container by itself, with everything of crust
dead. A runtime behind the same engine with another file for volumes needs `entry` and `evidence` of its own alone.
"""
