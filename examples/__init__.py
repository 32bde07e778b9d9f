"""Examples: complete programs built on crust's public rooms alone."""
