"""A lease is given back by acknowledging the original before its copy is confirmed."""

SCENARIO = "failures"
LAW = "P1: an acknowledged task is recorded in the end"
EDITS = [
    (
        "runtime.queues.pubsub.receiver:Receiver.give_back",
        """\
            deliveries = [owners[id(message)] for message in batch]
""",
        """\
            deliveries = [owners[id(message)] for message in batch]
            self.finish(deliveries)
            self._subscription.flush(5.0)
""",
    ),
]
