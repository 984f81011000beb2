"""A shim does not look for the cancel mark."""

SCENARIO = "jobs"
LAW = "an acknowledged cancel ends the job"
EDITS = [
    (
        "runtime.shim.record:RunRecord.cancelled",
        """\
        return any(self.record.has(name) for name in ("cancel", "cancel.%d" % self.index))
""",
        """\
        return False
""",
    ),
]
