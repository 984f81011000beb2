"""A cancel covers what was submitted before it by the clocks of two machines."""

SCENARIO = "workers"
LAW = "an acknowledged cancel is obeyed"
EDITS = [
    (
        "runtime.records.order_scope:Coverage.covers",
        """\
            return False
""",
        """\
            return False
        if task.submitted_at is not None:
            return task.submitted_at <= covered.before
""",
    ),
]
