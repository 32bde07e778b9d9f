"""The commands that run a program: proxy, shim, driver, node, and the settings, logs and metrics that all have."""
