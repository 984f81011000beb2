"""`wait` counts no records: counters of a worker that was killed stay short for ever."""

SCENARIO = "workers"
LAW = "`wait` ends once every task has"
EDITS = [
    (
        "runtime.records.totals:is_recount_due",
        """\
    if hint.exact:
""",
        """\
    if True:
""",
    ),
]
TAPE = "pauser:comes:0=1 w0.0:call:0=9 w1.0:work:0=3 w0.1:call:20=3 w0.1:call:41=6 w0.1:call:44=9"
