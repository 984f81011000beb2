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
