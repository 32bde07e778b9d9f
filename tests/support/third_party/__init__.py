"""Public drivers that others wrote, run unmodified, each from an environment of its own with pinned packages."""
