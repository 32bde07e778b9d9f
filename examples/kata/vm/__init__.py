"""The host's side of one microVM: QEMU's process, its devices, and the agent inside.

A runtime uses `machine.Machine`; `spec.MachineSpec` says what to start, `guest.Guest` calls the agent, and
`accel.probe` finds which accelerator works. Errors are in `faults`, values in `values`.
"""
