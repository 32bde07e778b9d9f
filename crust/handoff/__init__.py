"""The watched directory: how volumes reach a runtime, and how a runtime says which sandbox has them.

specs/handoff.md is the contract, numbered; the rooms here are its reference. The proxy writes records with
`store`, a runtime watches with `watch` and claims with `crust.runtime_handler`. Neither side talks to the other
through anything else on this path, and neither grpc nor generated code is imported here.
"""
