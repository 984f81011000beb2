"""Three losses bury a task, whatever they show."""

SCENARIO = "storm"
LAW = "P4: no innocent task is buried"
EDITS = [
    (
        "runtime.tasks.retry_policy:explain_crasher",
        """\
    blamed = [note for note in losses if note.alone and note.evidence]
""",
        """\
    blamed = losses
    blamed = blamed[:]
""",
    ),
]
TAPE = "killer:storm:0=1 w0.0:call:8=9 w0.3:work:0=2 w0.5:work:0=2"
