"""What another worker took for an end stands instead of the attempt's own."""

SCENARIO = "storm"
LAW = "P4: a guess does not stand for what a worker saw"
EDITS = [
    (
        "runtime.records.results:BlobResults.record_ended",
        """\
        step: Literal["lost", "ended"] = "lost" if note.unseen else "ended"
""",
        """\
        step: Literal["lost", "ended"] = "ended"
""",
    ),
]
