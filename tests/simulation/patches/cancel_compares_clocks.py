"""A cancel covers what was submitted before it by the clocks of two machines."""

SCENARIO = "workers"
LAW = "a cancel or purge ends nothing that is submitted after it"
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
TAPE = "canceller:comes:0=1 latecomer:when:0=3 latecomer:skew:0=4"
