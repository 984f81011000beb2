"""The marks by which the end of a removed job is known stay."""

SCENARIO = "garbage"
LAW = "what has ended stays as it ended"
EDITS = [
    (
        "runtime.client.jobs.record_removal:clear_record",
        """\
    remove_ends(job, files)
""",
        """\
""",
    ),
]
