"""Where the bytes of volumes are. `protocol` says what the driver needs; `files` is the default engine."""
