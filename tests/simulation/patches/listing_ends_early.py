"""A page that fails ends a listing as if it were complete."""

SCENARIO = "workers"
LAW = "`wait` tells the truth"
EDITS = [
    (
        "runtime.records.blobs.bucket:BucketBlobs._list",
        """\
            going, pages = pages, None
            going = going or self._obstore.list(self._store, folder or None, offset=last, chunk_size=PAGE)
""",
        """\
            going = pages
            going = pages = going or self._obstore.list(self._store, folder or None, offset=last, chunk_size=PAGE)
""",
    ),
]
TAPE = "waiter:call:31=15"
