"""Beside a real systemd."""
