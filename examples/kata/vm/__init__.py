"""The host's side of one microVM: QEMU's process, its devices, and the agent inside.

A runtime uses `machine.Machine`; `spec.MachineSpec` describes the VM, `guest.Guest` calls the agent, and
`accel.probe` finds which accelerator works. Errors are in `faults`, values in `values`.
"""
