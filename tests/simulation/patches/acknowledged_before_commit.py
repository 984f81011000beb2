"""A message is acknowledged before its record is committed."""

SCENARIO = "workers"
LAW = "P1: an acknowledged task is recorded in the end"
EDITS = [
    (
        "runtime.queues.pubsub.queue:PubSubQueue._settle_one",
        """\
            return base.refuse_lost(self.records, settlement)
""",
        """\
            return base.refuse_lost(self.records, settlement)
        self._intake.finish([delivery])
        self._intake._subscription.flush(5.0)
""",
    ),
]
