"""What the proxy knows of deferred volumes: entries, reservations, guards, devices, events.

All of it is rebuilt after a kill -9 from the handoff directory, mountinfo and the drivers.
"""
