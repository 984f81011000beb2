"""A worker does not look whether an order covers what it leases."""

SCENARIO = "workers"
LAW = "an acknowledged cancel is obeyed"
EDITS = [
    (
        "runtime.worker.control:ControlReader.is_cancelled",
        """\
        return control is not None and self._coverage.covers(control, lease.task, lease.published_at)
""",
        """\
        return False
""",
    ),
]
