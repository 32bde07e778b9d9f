"""What crust asks of the Kubernetes API. Optional: it needs the extra `crust-csi[kubernetes]`."""
