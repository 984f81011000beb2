"""Measures the runtime against its peers and against what the machine can do: `python -m benchmarks`."""
