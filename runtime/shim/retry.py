"""Decisions on what follows the end of an attempt, as pure functions."""

import os
import random

TEMPORARY_FAILURE = 75
"""A command that wants to be started again says so with this code (EX_TEMPFAIL)."""
BRIEF_S = 600.0
"""Attempts that gave way to a notice sooner than this came to a machine that was going already."""
LOST_IN_A_ROW = 3
TIMEOUTS_IN_A_ROW = 2

# What each end is charged to. Ends that are not here are final.
FAILURES = ("app_failed", "oom", "disk", "idle", "setup_failed", "timeout")
PREEMPTIONS = ("stopped", "lost", "preempted", "node_failed", "temporary")
FREE = ("requeue", "checkpointed")


def decide(ended, retry, pause=random.random):
    """("again", seconds) or ("final", reason) after `ended`, the notes of all attempts, oldest first.

    A note of None is an attempt that left no word: its machine went, so it counts as lost.
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
            return "final", _named(last)
        # The first costs no wait; after that the notice may stand for as long as the machine does.
        brief = _in_a_row([bool(note) and note.get("lasted_s", BRIEF_S) < BRIEF_S for note in ended], (True,))
        return "again", _pause(brief - 1, retry, pause) if brief > 1 else 0.0
    if last == "timeout" and _in_a_row(reasons, ("timeout",)) >= TIMEOUTS_IN_A_ROW:
        return "final", "timeout"
    if last not in FAILURES:
        return "final", last
    spent = sum(reason in FAILURES for reason in reasons)
    if spent > retry["failure"]:
        return "final", last
    return "again", _pause(spent, retry, pause)


def _charged(note, retry):
    """The reason of an attempt, as budgets see it: "temporary" where its exit code alone asked for another."""
    if not note:
        return "lost"
    code = note.get("code")
    asked = note["reason"] == "requeue" and code == TEMPORARY_FAILURE and str(code) not in retry["on_exit"]
    return "temporary" if asked else note["reason"]


def _pause(count, retry, pause):
    low, high = retry["backoff_s"]
    return min(high, low * 2 ** (count - 1)) * (0.5 + pause())


def pod_failures():
    """How many pods of this index had failed when this one was made, as Kubernetes counts; None elsewhere.

    It leaves those out that it disrupted itself: evicted, preempted, drained, or on a node that is gone.
    """
    said = os.environ.get("RUNTIME_POD_FAILURES", "")
    return int(said) if said.isdigit() else None


def name_end(note, before, after, full):
    """The end of an attempt that was asked to stop, or left no word, by what the backend counted before and after it.

    TERM alone proves nothing. What the backend has counted was no disruption of its own, and nobody knows what it was,
    unless its memory was nearly `full`: a container whose processes are killed together for that leaves no word.
    """
    if before is None or after is None:
        return note
    if after > before and full:
        return {"code": 137, "reason": "oom", "message": "went without a word when its memory was %s full" % full}
    if after > before:
        said = (note or {}).get("message") or "it left no word"
        return dict(note or {"code": 1}, reason="lost", message="%s, and the backend tells of no disruption" % said)
    return dict(note or {"code": 1, "message": "the backend took its machine away"}, reason="preempted")


def _in_a_row(reasons, wanted):
    count = 0
    for reason in reversed(reasons):
        if reason not in wanted:
            break
        count += 1
    return count


def _named(reason):
    # The backend's own state says more; the shim knows only that something took the machine away.
    # A command that never stopped asking for another attempt has failed.
    return {"stopped": "preempted", "temporary": "app_failed"}.get(reason, reason)
