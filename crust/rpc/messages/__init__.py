"""Messages: fields, limits, decoding into the values of `crust.volumes`, and what may be shown of them."""
