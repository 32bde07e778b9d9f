"""Messages: fields, limits, decoding into the values of `crust.core.volumes`, and redaction for logs."""
