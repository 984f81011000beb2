"""The loop counts a poll for tasks that it will not make while ends wait."""

SCENARIO = "workers"
LAW = "nothing spins"
EDITS = [
    (
        "runtime.worker.leasing:Leasing.next_at",
        """\
        if self.under_way or self._outbox.blocks_leasing or self.room() <= 0:
""",
        """\
        if self.room() <= 0:
""",
    ),
]
TAPE = ""
