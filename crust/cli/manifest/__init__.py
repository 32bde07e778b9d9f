"""`crust driver manifest`: the Kubernetes objects for a configuration, made from the files of deploy/kubernetes."""
