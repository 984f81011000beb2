"""The marks by which the end of a removed job is known stay."""

SCENARIO = "garbage"
LAW = "what has ended stays as it ended"
EDITS = [
    (
        "runtime.client.jobs.gc:clear_record",
        """\
    _remove_ends(job, files)
""",
        """\
""",
    ),
]
TAPE = ""
