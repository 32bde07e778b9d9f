"""Messages: fields, limits, decoding into the values of `crust.core.volumes`, and what may be shown of them."""
