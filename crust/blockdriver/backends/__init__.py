"""Where the bytes of volumes are. `protocol` says what the driver needs; `files` is the default.

Nothing outside a backend knows a file, a loop device or a pool's path.
"""
