"""A task starts before its time."""

SCENARIO = "calm"
LAW = "without faults nothing starts before its time or after its end, twice at once, or too often"
EDITS = [
    (
        "runtime.queues.pubsub.message:judge",
        """\
        elif due is not None and due > now:
            verdicts.later.append(delivery)
""",
        """\
""",
    ),
]
TAPE = "submitter:term:0=1"
