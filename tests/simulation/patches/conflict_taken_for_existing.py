"""A create that S3 refuses for another write is taken for one that found the object."""

SCENARIO = "control"
LAW = "a purge ends what was submitted before it"
EDITS = [
    (
        "runtime.records.blobs.bucket:BucketBlobs.create",
        """\
                if not self._exists(key):
""",
        """\
                if False:
""",
    ),
]
