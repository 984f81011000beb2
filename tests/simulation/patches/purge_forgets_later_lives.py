"""A purge leaves out tasks that were tried again."""

SCENARIO = "failures"
LAW = "a purge ends what was submitted before it"
EDITS = [
    (
        "runtime.queues.purge:Purge.end_submitted",
        """\
            again = dict(records.tried_again(name))
""",
        """\
            again: dict[str, int] = {}
""",
    ),
]
TAPE = "ender:ends:0=1 w0.0:work:0=2 w1.0:work:0=2 w0.0:failing:1=1 w1.0:failing:0=1 other-redriver:harsh-call:6=1 w0.0:failing:2=1 w1.0:work:2=2"
