"""The cluster's store in etcd.

From the bottom up: `methods` (the wire), `failures` (what a status means), `certificates` (why a member would refuse
ours), `channels` (one per member, recreated when the files change), `client` (calls that go to the next member),
`leases`, `watches`, `keys` and `records` (what is written where); on these `node_side`, and `leadership` with
`controller_side`.

Why own code and no client library: none was found that survives a denied or a compacted watch, and speaks mutual TLS
(docs/decisions/0023-etcd-is-listed-again.md).
"""
