"""Launchers: each starts, inspects and stops jobs on one kind of backend; `registry` finds them by name."""
