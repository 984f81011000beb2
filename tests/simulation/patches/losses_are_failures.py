"""A lost worker spends a failure."""

SCENARIO = "storm"
LAW = "P4: each failure that was spent has an attempt that failed"
EDITS = [
    (
        "runtime.tasks.retry_policy:decide",
        """\
        case Budget.PREEMPTIONS:
""",
        """\
        case Budget.PREEMPTIONS:
            if len(losses) >= failures_allowed(task):
                return GiveUp(EndReason.APP_FAILED, "lost")
""",
    ),
]
TAPE = "crasher:comes:0=1"
