"""The handoff directory: the proxy publishes volumes in it, and a runtime records which sandbox has which volume.

specs/handoff.md is the numbered contract; this package is its reference implementation. The proxy writes records with
`store`. A runtime watches with `watch` and claims volumes with `crust.runtime_handler`. On this path the two sides
use nothing but the directory, and this package imports neither grpc nor generated code.
"""
