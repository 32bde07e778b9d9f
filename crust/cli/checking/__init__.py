"""The commands that try something out: configuration, conformance, a publish."""
