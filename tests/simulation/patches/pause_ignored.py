"""A worker on Pub/Sub does not heed a pause."""

SCENARIO = "calm"
LAW = "an acknowledged order is in force"
EDITS = [
    (
        "runtime.worker.control:ControlReader.paused",
        """\
        return self._control is None or self._control.paused or self.stale
""",
        """\
        return self._control is None or self.stale
""",
    ),
]
TAPE = "pauser:comes:0=1 submitter:term:0=1 w0.0:work:0=1 w0.0:work:3=3"
