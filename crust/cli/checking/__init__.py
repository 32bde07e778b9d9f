"""The commands that test: configuration, conformance, a publish."""
