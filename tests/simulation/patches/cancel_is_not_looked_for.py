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
TAPE = "canceller:comes:0=1 w0.0:call:0=9 w1.0:work:0=3 w0.1:work:0=2"
