"""A retry takes the newest epoch that it finds written down for that of all parts."""

SCENARIO = "garbage"
LAW = "a job's command runs once at a time"
EDITS = [
    (
        "runtime.client.jobs.retry:go_on",
        """\
    newest = max([1, *(each.epoch for each in entry.natives), *unnoted.values()])
""",
        """\
    newest = max([1, *(each.epoch for each in entry.natives)])
    unnoted = {part: epoch for part, epoch in unnoted.items() if epoch > newest}
""",
    ),
]
TAPE = "same:runs:0=2 carol:when:0=1 sweeper:old:0=2 n3_1.1:run:0=2 n1_0.1:run:0=2 n1_0.1:result:0=3 n2.1:result:0=1 sweeper:asked:1=1 n1_0:death:0=1 retrier:steady-call:96=1 retrier:submits:0=2 retrier:steady-call:101=21 retrier:submits:1=1 retrier:full:16=1 sweeper:steady-call:65=1 sweeper:steady-call:104=1 sweeper:asked:3=1 sweeper:asked:4=1"
