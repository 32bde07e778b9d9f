"""The runtimes of this node: who has registered, what each can do, and the calls to their handlers."""
