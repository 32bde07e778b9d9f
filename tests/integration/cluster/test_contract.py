"""The store in etcd keeps to the contract of stores."""

from tests.support.cluster.cluster_contract import StoreContract


class TestEtcdStore(StoreContract):
    """The contract, on a real member with TLS and roles."""
