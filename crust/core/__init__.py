"""The parts that all of crust uses: values, errors, operations, settings, logs, metrics, traces."""
