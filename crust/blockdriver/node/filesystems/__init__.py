"""Whether a device is formatted, by whom, and one tool at a time on each."""
