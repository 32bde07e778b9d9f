"""The commands that test: configuration, a publish."""
