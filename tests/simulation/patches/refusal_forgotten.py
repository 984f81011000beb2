"""A refused settlement that is handed over again counts as recorded."""

SCENARIO = "rush"
LAW = "a worker counts what it has recorded"
EDITS = [
    (
        "runtime.queues.pubsub.queue:PubSubQueue._settle_one",
        """\
        if refused is None:
            # Otherwise the same settlement, handed over again, is refused again.
            delivery.settled_as = record.token
""",
        """\
        delivery.settled_as = record.token
""",
    ),
]
TAPE = "world:small-bodies:0=1 world:policy:0=1 submitter:when:0=1 submitter:term:11=1 submitter:call:1=1 submitter:call:14=1 submitter:call:24=1 submitter:call:28=1 w0.0:call:12=1 w1.0:call:9=1 w0.0:call:25=12 w1.0:call:46=1 w1.0:call:49=1 w1.0:call:87=1 w1.0:call:118=15 w1.0:call:186=15"
