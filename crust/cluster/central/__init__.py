"""The controller of the whole cluster: it places new volumes and routes calls to the node that has the pool."""
