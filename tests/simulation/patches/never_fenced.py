"""A task that ends its workers on one host never runs fenced."""

SCENARIO = "storm"
LAW = "P9: a crasher becomes a dead letter"
EDITS = [
    (
        "runtime.tasks.retry_policy:_wants_fence",
        """\
    return max(alone.values(), default=0) >= LOSSES_TO_FENCE
""",
        """\
    return max(alone.values(), default=0) > 10**9
""",
    ),
]
TAPE = "crasher:comes:0=1 crasher-of-workers:comes:0=1"
