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
TAPE = "world:small-puts:0=1 world:small-ahead:0=1 planner:when:0=2 w0.0:switch:0=2 submitter:die:0=1 canceller-of-one:hold:0=3 w0.0:work:3=1 w0.0:hold:7=1 w0.0:look:20=3 w0.0:switch:22=2 w0.0:die:28=2 w1.0:die:19=1"
