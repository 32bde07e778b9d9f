"""What every part of crust is made with: values, errors, operations, settings, logs, metrics, traces."""
