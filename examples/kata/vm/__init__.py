"""The host's side of one microVM: QEMU's process, its devices, and the agent inside.

`machine.Machine` is what a runtime uses; `spec.MachineSpec` says what to start, `guest.Guest` what may be
asked of the inside, `accel.probe` which accelerator works. Errors are in `faults`, values in `values`.
"""
