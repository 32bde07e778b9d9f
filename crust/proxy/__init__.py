"""The node daemon that serves the CO's CSI socket in front of the driver.

For each publish the proxy decides whether to defer the mount. If so, it takes the metadata from the shim's answer and
publishes it to a runtime handler through the handoff directory; statistics and expansion go to that handler. All
other calls pass through as bytes. The proxy keeps only state that it can rebuild after a kill -9: the handoff
directory lists the deferred volumes, mountinfo the guard mounts, and the open streams are the registered handlers.
"""
