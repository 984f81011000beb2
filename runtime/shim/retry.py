"""Decides what follows the end of an attempt. Pure."""

import os
import random

TEMPORARY_FAILURE = 75
"""Exit code of a command that asks to be started again (EX_TEMPFAIL)."""
BRIEF_S = 600.0
"""An attempt that gave way to a notice sooner than this began on a machine that was already going."""
LOST_IN_A_ROW = 3
TIMEOUTS_IN_A_ROW = 2

# The budget that each end is charged to. Ends that are not here are final.
FAILURES = ("app_failed", "oom", "disk", "idle", "setup_failed", "timeout")
PREEMPTIONS = ("stopped", "lost", "preempted", "node_failed", "temporary")
FREE = ("requeue", "checkpointed")

LOSS = "node_failed"
"""File of an attempt's folder: the backend's own word that a machine of the attempt died."""


def decide(ended, retry, pause=random.random):
    """("again", seconds) or ("final", reason) after `ended`, the notes of all attempts, oldest first.

    A note of None is an attempt without an end: its machine went, so it counts as lost.
    """
    reasons = [_charged(note, retry) for note in ended]
    last = reasons[-1]
    if last in FREE:
        return "again", 0.0
    if last in PREEMPTIONS:
        if last == "lost" and _in_a_row(reasons, ("lost",)) >= LOST_IN_A_ROW:
            return "final", "lost"
        spent = sum(reason in PREEMPTIONS for reason in reasons)
        if spent > retry["preemption"]:
            # The backend's own state has more; the shim knows only that it lost the machine. A command that never stops
            # asking for another attempt has failed.
            return "final", {"stopped": "preempted", "temporary": "app_failed"}.get(last, last)
        # The first costs no wait; after that the notice may last as long as the machine does.
        brief = _in_a_row([bool(note) and note.get("lasted_s", BRIEF_S) < BRIEF_S for note in ended], (True,))
        return "again", _pause(brief - 1, retry, pause) if brief > 1 else 0.0
    if last == "no_capacity" and _waited_s(ended) < retry.get("capacity_s", 0.0):
        return "again", _pause(_in_a_row(reasons, ("no_capacity",)), retry, pause)
    if last == "timeout" and _in_a_row(reasons, ("timeout",)) >= TIMEOUTS_IN_A_ROW:
        return "final", "timeout"
    if last not in FAILURES:
        return "final", last
    spent = sum(reason in FAILURES for reason in reasons)
    if spent > retry["failure"]:
        return "final", last
    return "again", _pause(spent, retry, pause)


def _charged(note, retry):
    """The reason of an attempt as budgets see it: "temporary" if its exit code alone asked for another."""
    if not note:
        return "lost"
    code = note.get("code")
    asked = note["reason"] == "requeue" and code == TEMPORARY_FAILURE and str(code) not in retry["on_exit"]
    return "temporary" if asked else note["reason"]


def _waited_s(ended):
    """For how long attempts in a row have found no capacity."""
    row = ended[len(ended) - _in_a_row([note and note["reason"] for note in ended], ("no_capacity",)) :]
    return row[-1].get("at", 0.0) - row[0].get("at", 0.0)


def _pause(count, retry, pause):
    low, high = retry["backoff_s"]
    return min(high, low * 2 ** (count - 1)) * (0.5 + pause())


def pod_failures():
    """How many pods of this index had failed when this one was made, as Kubernetes counts; None elsewhere.

    It leaves out pods that it disrupted itself: evicted, preempted, drained, or on a node that is gone.
    """
    said = os.environ.get("RUNTIME_POD_FAILURES", "")
    return int(said) if said.isdecimal() else None


def name_end(note, before, after, full):
    """The end of an attempt that was asked to stop, or left no end, by the backend's failure counts before and after it.

    TERM alone proves nothing. A counted failure was no disruption by the backend, and its cause is unknown unless the
    memory was nearly `full`: a container whose processes are all killed for that leaves no end.
    """
    if before is None or after is None:
        return note
    if after > before and full:
        return {"code": 137, "reason": "oom", "message": "went without a word when its memory was %s full" % full}
    if after > before:
        said = (note or {}).get("message") or "it left no word"
        return dict(note or {"code": 1}, reason="lost", message="%s, and the backend tells of no disruption" % said)
    return dict(note or {"code": 1, "message": "the backend took its machine away"}, reason="preempted")


def name_loss(note, loss):
    """The end of an attempt by the backend's word that its machine died, unless the attempt itself knew its end."""
    if loss is None or (note and note["reason"] != "stopped"):
        return note
    return dict(note or {"code": 1}, reason="node_failed", message=loss.get("message", ""))


def forgive_commands(ended):
    """The ends as the budgets of a held machine see them: they pay for its loss, and for no command."""
    return [
        note if not note or note["reason"] in PREEMPTIONS else dict(note, reason="requeue", code=0) for note in ended
    ]


def _in_a_row(reasons, wanted):
    count = 0
    for reason in reversed(reasons):
        if reason not in wanted:
            break
        count += 1
    return count
