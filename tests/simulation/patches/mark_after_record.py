"""The record comes before the mark."""

SCENARIO = "failures"
LAW = "P1: a failed task is a dead letter until it is tried again"
EDITS = [
    (
        "runtime.records.base:settle_record",
        """\
    if mark is not None:
        records.mark(mark)
        faults.reach("queue.marked")
    try:
        records.commit(record)
""",
        """\
    try:
        records.commit(record)
        if mark is not None:
            records.mark(mark)
""",
    ),
]
TAPE = "w0.0:harsh-call:6=3 w1.0:failing:0=1 w1.0:harsh-call:8=3 w1.0:failing:1=1 w1.0:harsh-call:21=9"
