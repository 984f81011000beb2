"""A death shows only when the lease runs out."""

SCENARIO = "sqlite"
LAW = "a worker's death is noticed at once"
EDITS = [
    (
        "runtime.queues.sqlite.local_workers:LocalWorkers._is_dead",
        """\
        return not Presence.alive(self._file.workers_folder, worker)
""",
        """\
        return False
""",
    ),
]
TAPE = "w1.0:die:7=1"
