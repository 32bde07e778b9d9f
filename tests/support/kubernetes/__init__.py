"""A Kubernetes of one node for tests: the programs of Kubernetes itself, in namespaces of the test run's own."""
