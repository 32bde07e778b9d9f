"""`crust kata`: an unmodified Kata Containers consumes deferred volumes, under an unmodified containerd.

    ttrpc         the two layers below NRI: frames, and calls in both directions
    nri           the plugin: which container the engine is about to create or start
    gate          which container may use which volume: every refusal, and its reason
    entry         Kata's own file for a volume: the real one, and the placeholder that names no device, which is there
                  from the publish to the unpublish
    evidence      which process is a sandbox's virtual machine, and which devices Kata has attached to it; go_runtime
                  and rust_runtime know the details of Kata's two runtimes
    grants        the claim of a sandbox, its keeper, and the real entry for as long as a container needs it
    keeper_watch  keepers that were killed, and machines that have lost Kata's shim
    statistics    the proxy's questions to the guest, one at a time for each sandbox
    process       the daemon

Kata's entry names the device only while a container of the claiming sandbox is created and not yet started. At all
other times it names a device that does not exist, and Kata refuses the container, even if no process of crust runs.
Another runtime behind the same engine, with its own file for volumes, needs only its own `entry` and `evidence`.
"""
