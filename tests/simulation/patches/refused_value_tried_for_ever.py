"""A value that the store refuses is handed over again and again, with all that ended beside it."""

SCENARIO = "workers"
LAW = "P9: what has ended is settled"
EDITS = [
    (
        "runtime.worker.settling:Settler._answered",
        """\
        elif may_pass(problem):
""",
        """\
        elif True:
""",
    ),
]
TAPE = "purger:comes:0=1 w1.0:call:3=2 w0.0:outcome:2=4 purger:call:42=12 w1.0:call:17=1"
