"""`crust bundle FILE`: a support archive of this node, for a bug report.

It collects what is there and says of the rest why it is missing. Each part is bounded, and every line of text passes
the filter for credentials before it is written; nothing is read that holds secrets by design (kubeconfigs, volumes).
The archive is new, only its owner can read it, and it is removed if it cannot be completed.
"""
