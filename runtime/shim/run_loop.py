"""One index, attempt after attempt."""

import os
import subprocess
import tempfile
import time

from runtime.faults import reach
from runtime.shim.attempt import OVERTAKEN, CommandAttempt
from runtime.shim.common import AGAIN, DONE, DUPLICATE, FAILED, AlreadyClaimed, OrderRefused, SetupFailed, say
from runtime.shim.files import fold, make_folder, token
from runtime.shim.logs import LOG_BYTES
from runtime.shim.processes import stops_within
from runtime.shim.record import FolderRecord, RunRecord, refuse_if_later, scratch_prefix
from runtime.shim.rendezvous import POLL_S, find_attempt, open_meeting
from runtime.shim.retry import decide, pod_failures
from runtime.shim.tree_walk import remove_folder

HALTED = "stopped"
"""Mark of an array that stops at a failure: one of its indices has failed."""
AWAY = ("stopped", "preempted")
"""Ends of an attempt whose machine went away."""
KILLED_S = 10.0
"""How long to wait for the end of this shim if the command that requeues it was killed."""


def rank_number():
    """The number of this rank, from the variables of the backend's starter."""
    for name in ("SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    raise OrderRefused("nothing says which rank this is")


def serve_rank(order, folder, options, asked):
    """Run one rank of an attempt whose ranks a starter of the backend runs; returns an exit code."""
    leader = os.environ.get("RUNTIME_LEADER") or "127.0.0.1"
    scratch = tempfile.mkdtemp(prefix=scratch_prefix(order["job"], options.index), dir=options.scratch)
    try:
        run = RunRecord(FolderRecord(folder), options.index)
        return CommandAttempt(order, run, options.rank_of, scratch, asked, {}, leader=leader).run_rank(rank_number())
    finally:
        remove_folder(scratch)


def serve(order, record, index, options, asked, binding):
    """Run one index until it has a result or the backend has to start us again; returns an exit code."""
    run = RunRecord(record, index, order.get("told"))
    run.log_bytes, run.outputs = order.get("log_bytes", LOG_BYTES), order.get("outputs")
    if order.get("notices"):
        asked.watch(order["notices"])

    def give_up():
        """Whether a cancel mark or a request to stop explains the end that a full disk refuses to record."""
        return asked.stop or run.cancelled()

    record.give_up = give_up
    if order.get("hold"):
        from runtime.shim.dev_loop import DevTrees

        run.hold = DevTrees(order, run)
    try:
        end = None if run.result() else run.unread_end(order)
        if end:
            say("index %d ended before as %s, and its result cannot be read" % (run.index, end["reason"]))
            return settle(order, run, end, whole=False)
        return _serve(order, run, options, asked, binding, give_up)
    except (IOError, OSError) as problem:
        if not give_up():
            raise
        say("leaves no word of how index %d ended: %s" % (index, problem))
        return FAILED if run.cancelled() else AGAIN
    finally:
        if run.hold:
            run.hold.close()


def _serve(order, run, options, asked, binding, give_up):
    while True:
        result = run.result()
        if result:
            run.tell(result)
            run.announce(result)  # its maker may have died before it could
            return settle(order, run, result)
        if run.cancelled():
            return settle(order, run, run.commit("cancelled", 1, 0, {}, give_up))
        run.clear()
        before = run.counted(order)
        over = run.hold and run.hold.find_end()
        what, then = decide(before, order["retry"]) if before and not over else ("again", 0.0)
        halted = not over and what != "final" and run.record.has(HALTED)
        if over or halted or what == "final":
            last = run.last_attempt() if before else 0
            if before and not last:
                continue  # the job was folded meanwhile
            if over:
                return settle(order, run, run.commit(over[0], over[1], last, over[2], give_up))
            if halted:
                said = {"message": "another index failed"}
                return settle(order, run, run.commit("sibling_failed", 1, last, said, give_up))
            return settle(order, run, run.commit(then, 1, last, before[-1] or {}, give_up))
        if asked.goes:
            again = next_start(order, options, 0.0, asked, run)
            if again is not None:
                return again
            continue
        gpus, problem = run.hold and run.hold.gpus, None
        try:
            if order.get("gpus") and not gpus:
                from runtime.shim.gpus import take_gpus

                gpus = take_gpus(order, lambda: asked.stop or asked.goes or run.cancelled())
        except SetupFailed as found:
            problem = found
        if gpus is False:
            if asked.stop:
                return AGAIN
            continue
        if run.hold:
            run.hold.gpus = gpus
        if (before or gpus) and not serves(order, run, options):
            if gpus and not run.hold:  # which gives its own back when it closes
                gpus.drop()
            return DUPLICATE
        # The path is noted before the folder is made, since a shim may be killed.
        parent = os.path.abspath(options.scratch or tempfile.gettempdir())
        scratch = os.path.join(parent, scratch_prefix(order["job"], run.index) + token())
        now = run.hold.begin() if run.hold else order
        number = run.claim(options.native, scratch, give_up)
        if run.result():
            run.withdraw(number)  # another shim was faster, and the folders that attempts are counted by may be folded
            continue
        reach("shim.claimed")
        if run.is_overtaken(number):
            reason, code, details = OVERTAKEN  # we stood still in between
            if gpus and not run.hold:
                gpus.drop()
        elif problem:
            reason, code, details = "setup_failed", 1, {"message": str(problem)}
        else:
            reason, code, details = attempt_once(now, run, number, scratch, asked, binding, gpus)
        reach("shim.ended")
        if reason != "succeeded" and run.cancelled():
            reason, code, details = "cancelled", 1, {}  # the command may have ended before we saw the mark
        elif run.is_overtaken(number):
            reason, code, details = (reason, code, details) if reason in AWAY else OVERTAKEN
            run.end(number, reason, code, details, give_up)
            say("index %d: %s" % (run.index, OVERTAKEN[2]["message"]))
            return AGAIN if asked.stop or asked.goes else DUPLICATE
        if run.hold and reason not in AWAY + ("cancelled",):
            run.end(number, "app_failed" if reason == "final_failure" else reason, code, details, give_up)
            run.hold.wait(asked, lambda number=number: run.cancelled() or run.is_overtaken(number))
            if asked.stop or run.is_overtaken(number):
                return AGAIN if asked.stop else DUPLICATE
            continue
        if reason in ("succeeded", "cancelled"):
            result = run.commit(reason, code, number, details, give_up if reason == "cancelled" else None)
            if order.get("artifacts") and (result["reason"], result["attempt"]) == ("succeeded", number):
                clear_artifacts(order, run, number)
            return settle(order, run, result)
        named = "app_failed" if reason == "final_failure" else reason
        run.end(number, named, code, details, give_up)
        reach("shim.noted")
        if named == "stopped" and asked.stop and pod_failures() is not None:
            return AGAIN  # the next start knows whether the backend took the machine away, and decides
        if reason == "final_failure":
            return settle(order, run, run.commit(named, code, number, details, give_up))
        if named == "preempted" and order.get("notices"):
            asked.goes = True  # the command itself may have seen the notice first
        counted = run.counted(order, number)
        if not counted:
            say("index %d: others have ended it" % run.index)  # while we stood still, and it is folded
            return DUPLICATE
        what, then = decide(counted, order["retry"])
        if what == "final":
            return settle(order, run, run.commit(then, code, number, details, give_up))
        if asked.stop:
            return AGAIN
        again = next_start(order, options, then, asked, run)
        if again is not None:
            return again


def serves(order, run, options):
    """Whether no native job of a later epoch serves the run: an attempt here would end the one that began there."""
    try:
        refuse_if_later(
            run.record, order.get("epoch", 1), order.get("part", 0) if options.part is None else options.part
        )
    except AlreadyClaimed as owner:
        say("index %d was taken up by %s" % (run.index, owner))
        return False
    return True


def attempt_once(order, run, number, scratch, asked, binding, gpus):
    """Run one attempt and give back its folder and GPUs; returns (reason, exit code, details)."""
    os.mkdir(scratch, 0o700)
    meeting = open_meeting(order, run, number)
    try:
        if gpus:
            binding = dict(binding, **gpus.variables())
        if not run.record.before(run, number, asked):
            return asked.end()
        try:
            end = CommandAttempt(order, run, number, scratch, asked, binding, gpus, meeting=meeting).go()
        finally:
            run.record.after(run, number)
        if meeting is not None:
            meeting.conclude(end, asked)
        return end
    finally:
        tidy(
            number,
            ([meeting.leave] if meeting is not None else [])
            + [lambda: _remove(scratch)]
            + ([gpus.drop] if gpus and not run.hold else []),
        )


def tidy(number, steps):
    """Take the steps after an attempt. What fails is said: the attempt's end counts, and is still to be recorded."""
    for step in steps:
        try:
            step()
        except Exception as problem:
            say("cannot tidy up after attempt %d: %s: %s" % (number, type(problem).__name__, problem))


def _remove(scratch):
    left = remove_folder(scratch)
    if left is not None:
        raise left


OF_NODE_0 = ("time_limit_s", "native_limit_s", "idle_timeout_s")
"""Parts of the order that only node 0 of a run keeps."""


def serve_node(order, record, index, options, asked):
    """Serve the attempts of a run that node 0 begins, as another of its nodes; returns an exit code."""
    try:
        return _serve_node(order, record, index, options, asked)
    except (IOError, OSError) as problem:
        say("node %d cannot go on: %s" % (options.node, problem))
        return AGAIN


def _serve_node(order, record, index, options, asked):
    # A node that waits too long gives its machine back, since node 0 may need it to begin at all.
    run = RunRecord(record, index, order.get("told"))
    run.node, run.log_bytes = options.node, order.get("log_bytes", LOG_BYTES)
    run.outputs = order.get("outputs")
    order = {name: value for name, value in order.items() if name not in OF_NODE_0}
    end = None if run.result() else run.unread_end(order)
    if end:
        return DONE if end["reason"] == "succeeded" else FAILED
    waits_s = order["meet"]["start_s"]
    if order["retries"] == "shim":
        waits_s += 2 * order["retry"]["backoff_s"][1]  # node 0 pauses before the next attempt
    until = time.monotonic() + waits_s
    if order.get("notices"):
        asked.watch(order["notices"])
    while not asked.stop and not asked.goes:
        result = run.result()
        if result:
            run.tell(result)
            return DONE if result["reason"] == "succeeded" else FAILED
        number = find_attempt(run)
        if number is not None:
            serve_part(order, run, number, options, asked)
            if order["retries"] != "shim":
                # The result, if there is one, follows the end of the attempt.
                stops_within(3 * POLL_S, asked, run.result)
                result = run.result()
                return AGAIN if result is None else DONE if result["reason"] == "succeeded" else FAILED
            until = time.monotonic() + waits_s
        elif time.monotonic() >= until:
            say("node %d waited %d s, and node 0 began no attempt" % (run.node, waits_s))
            return AGAIN
        else:
            stops_within(POLL_S, asked)
    return AGAIN


def serve_part(order, run, number, options, asked):
    """Run this node's part of an attempt."""
    parent = os.path.abspath(options.scratch or tempfile.gettempdir())
    scratch = os.path.join(parent, scratch_prefix(order["job"], run.index) + token())
    make_folder(run.attempt_folder(number))
    try:
        attempt_once(order, run, number, scratch, asked, {}, None)
    except AlreadyClaimed:
        say("another shim serves node %d" % run.node)


def clear_artifacts(order, run, number):
    """Remove versions of artifacts that the success of an attempt supersedes. They do no harm, so a problem fails no job."""
    from runtime.shim.artifacts import clear_superseded

    try:
        clear_superseded(order, run, number)
    except Exception as problem:
        say("older versions of artifacts stay in the record root: %s" % problem)


def settle(order, run, result, whole=True):
    """The exit code of an index with this result. The first failure of an array may stop the others. A run that is not
    `whole` is not folded, since its files are damaged."""
    stops = order.get("on_task_failure") == "stop"
    if stops and result["reason"] not in ("succeeded", "cancelled", "sibling_failed"):
        run.record.mark(HALTED)
    if whole and order.get("fold") and len(order["runs"]) > 1 and run.record.folds:
        try:
            fold(run.job, run.name)
        except Exception as problem:
            say("cannot fold run %d: %s" % (run.index, problem))
    return DONE if result["reason"] == "succeeded" else FAILED


def next_start(order, options, pause, asked, run):
    """Have the job started again after a pause: by the backend (then an exit code), or here (then None)."""
    how = order["retries"]
    if how == "backend":
        return AGAIN
    if stops_within(pause, asked, lambda: asked.goes or run.cancelled()):
        return AGAIN
    if run.cancelled():
        return None
    if how == "requeue":
        words = [word.replace("{native}", options.member or options.native) for word in order["requeue"]]
        try:
            answer = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            said = answer.communicate()[0].decode("utf-8", "replace").strip()
        except OSError as problem:
            answer, said = None, str(problem)
        if answer is not None and answer.returncode == 0:
            return AGAIN
        # Requeuing may end the command that asks for it a moment before it ends us.
        if stops_within(KILLED_S if answer is not None and answer.returncode < 0 else 1.0, asked):
            return AGAIN
        say("cannot be requeued, goes on here: %s" % said)
    if asked.goes:
        say("this machine will be taken away, so no other attempt begins here")
        return AGAIN
    return None
