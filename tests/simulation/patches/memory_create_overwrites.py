"""Creating an object replaces it."""

SCENARIO = "memory"
LAW = "P2: a record never changes"
EDITS = [
    (
        "runtime.records.memory:MemoryBlobs.create",
        """\
            if key in self._blobs:
                return False
""",
        """\
""",
    ),
]
TAPE = ""
