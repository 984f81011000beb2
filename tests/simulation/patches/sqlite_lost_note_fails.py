"""A lost attempt counts as a failure of the task."""

SCENARIO = "sqlite"
LAW = "P4: each failure that was spent has an attempt that failed"
EDITS = [
    (
        "runtime.queues.sqlite.local_workers:LocalWorkers._make_note",
        """\
            reason=EndReason.LOST,
""",
        """\
            reason=EndReason.APP_FAILED,
""",
    ),
]
