"""A task is tried once more than its failures allow."""

SCENARIO = "calm"
LAW = "without faults nothing starts before its time or after its end, twice at once, or too often"
EDITS = [
    (
        "runtime.tasks.retry_policy:decide",
        """\
            if spent >= failures_allowed(task):
""",
        """\
            if spent > failures_allowed(task):
""",
    ),
]
TAPE = "canceller:comes:0=1 w1.0:work:2=2 latecomer:term:0=3 w0.0:work:2=2 w1.0:work:3=2 w0.0:work:3=2"
