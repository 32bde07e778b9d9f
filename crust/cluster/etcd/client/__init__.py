"""A client of etcd over grpc.aio: members, certificates, failures, leases, watches, transactions."""
