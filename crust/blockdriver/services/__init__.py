"""The gRPC services: decode, call one rule, encode. Nothing else."""
