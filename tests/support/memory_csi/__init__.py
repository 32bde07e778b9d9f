"""A complete CSI driver in memory, correct unless a test makes it break a rule; the conformance suite runs on it.

It has every capability and no kernel: a mount is an entry of a table, which the suite reads through `MemoryHost`.
There are two ways to break a rule: `faults`, names that the driver's code checks, and `twist`, which sees every
request and its answer, and may replace the answer.
"""
