"""The engines, which store the bytes of volumes. `protocol` is their interface; `files` is the default engine."""
