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
TAPE = "world:small-bodies:0=1 retries:comes:0=1 submitter:when:0=3 w1.0:harsh-call:13=9 w0.0:harsh-call:15=12 w1.1:failing:0=1 w1.1:work:1=3 w1.1:harsh-call:47=4 w1.1:failing:1=1 w1.1:harsh-call:51=9"
