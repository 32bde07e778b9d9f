"""A whole CSI driver in memory, correct until it is told to break one rule: what the conformance suite is tried on.

It has every capability and no kernel: what would be a mount is an entry of a table, and the suite looks at it
through `Eyes`. Rules are broken in two ways: `faults`, words that the driver's code asks for, and `twist`, which sees
every request and what would be answered, and may answer something else.
"""
