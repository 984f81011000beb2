"""A delayed task never comes up."""

SCENARIO = "sqlite"
LAW = "`wait` ends once every task has"
EDITS = [
    (
        "runtime.queues.sqlite.tables:promote_due",
        """\
            [(queue, rank, seq, tries, flags) for _, seq, tries, flags, queue, rank in due],
""",
        """\
            [(queue, rank, seq, tries, flags) for _, seq, tries, flags, queue, rank in due if flags],
""",
    ),
]
TAPE = "canceller-of-one:when:0=3 submitter:die:1=2"
