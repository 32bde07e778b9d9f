"""Examples: complete programs that use only crust's public packages."""
