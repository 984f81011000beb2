"""Measures the runtime against its peers and against the limits of the machine: `python -m benchmarks`."""
