"""A task that failed once is not put back."""

SCENARIO = "memory"
LAW = "P1: an acknowledged task is recorded in the end"
EDITS = [
    (
        "runtime.queues.memory:MemoryQueue.release",
        """\
                del self._held[task.id]
""",
        """\
                del self._held[task.id]
                if release.note is not None:
                    continue
""",
    ),
]
TAPE = "w0.0:outcome:2=1"
