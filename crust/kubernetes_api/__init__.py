"""Crust's questions to the Kubernetes API. Optional: they need the extra `kubernetes`."""
