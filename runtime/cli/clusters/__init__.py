"""The commands of `runtime cluster`."""
