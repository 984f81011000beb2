"""A preemption spends the budget of failures."""

SCENARIO = "jobs"
LAW = "each failure that was counted is an attempt that failed"
EDITS = [
    (
        "runtime.shim.retry",
        """\
FAILURES = ("app_failed", "oom", "disk", "idle", "setup_failed", "timeout")
PREEMPTIONS = ("stopped", "lost", "preempted", "node_failed", "temporary")
""",
        """\
FAILURES = ("stopped", "app_failed", "oom", "disk", "idle", "setup_failed", "timeout")
PREEMPTIONS = ("lost", "preempted", "node_failed", "temporary")
""",
    ),
]
TAPE = "n2.1:run:0=3 n2:mishap:5=1 n4.1:run:0=2 n4:mishap:0=1"
