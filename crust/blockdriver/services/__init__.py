"""The gRPC services: decode, call one rule, encode. Nothing else. A rule that blocks is called on a thread."""
