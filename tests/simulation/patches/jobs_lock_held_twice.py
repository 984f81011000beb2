"""A launch takes the job's lock beside a living holder."""

SCENARIO = "jobs"
LAW = "what has ended stays as it ended"
EDITS = [
    (
        "runtime.jobs.lock:Lock.take",
        """\
                    return held is not None
                continue
""",
        """\
                    return held is not None
                continue
            dead = held, holder.get("token")
""",
    ),
    (
        "runtime.jobs.lock:Lock.take",
        """\
            if not told:
                told = True
                tell("another launcher is at work on this job; waiting for it")
            system.sleep(BEAT_S / 4)
""",
        """\
""",
    ),
    (
        "runtime.jobs.lock:Lock.is_held",
        """\
        if self._newest() != self._number:
            return False
""",
        """\
""",
    ),
]
TAPE = "same:runs:0=1 bob:switch:3=2 n3_0:queued:0=1 carol:switch:5=2 carol:switch:8=2"
