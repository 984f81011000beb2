"""One attempt of an index: started, watched until it ends, and judged."""

import errno
import io
import json
import os
import signal
import time

from runtime.shim.common import BEAT_S, BEGAN, LOOK_S, SOON_S, AlreadyClaimed, NoCapacity, SetupFailed, say, shell_code
from runtime.shim.files import METRICS, METRICS_SUM, create_whole, make_folder, read_system, write_whole
from runtime.shim.metrics import Reports
from runtime.shim.processes import ASKING, ENDING, end_orphans, reap_orphans
from runtime.shim.ranks import PREEMPTED_NOTE, SETUP_FAILED, Ranks, make_command
from runtime.shim.resource_usage import DiskUse, disk_limit, memory_share, ran_out_of_memory
from runtime.shim.retry import TEMPORARY_FAILURE, pod_failures
from runtime.shim.tree_walk import walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FAILED_RANK = "failed"
"""File of an attempt's folder with the first rank that failed by itself, and its exit code, if a starter runs the ranks."""
HEAR_S = 1.0
"""How long to wait for a signal to this shim if a command ended by one."""
MEMORY_S = 0.5
MEMORY_FULL, MEMORY_FREE = 0.9, 0.8
"""The part of a container's memory at which it counts as nearly full, and at which it no longer does."""
DISK_AT_ONCE_S = 0.005
"""How long one look at the disk lasts, since everything else waits meanwhile."""
DISK_LAST_S = 0.5
"""How long the last look lasts when asked to stop: a node that evicts for its disk gives a second."""
SUMS_LAST_S = 60.0
"""How often the sum of the reports is written after a long time; at first it is each `BEAT_S`."""
SUM_UP_S, SUM_UP_IN_HASTE_S = 5.0, 0.2
"""How long an attempt that has ended may take to read its reports, and one whose machine goes."""
LIMIT_SLACK_S = 30.0
"""How long before the backend's own limit, less the grace, an attempt ends at the latest."""


OVERTAKEN = "stopped", 1, {"message": "the job was taken up elsewhere, and the next attempt began there"}
"""The result of an attempt that is not the last one any more."""


def keep_native_limit(order, deadline):
    """The deadline, or the time at which the backend's own limit, whose end would leave no note, is near."""
    if not order.get("native_limit_s"):
        return deadline
    # A restart in place has the rest of that limit.
    left = BEGAN + order["native_limit_s"] - order["grace_s"] - LIMIT_SLACK_S
    return min(deadline or left, left)


class LifeSigns(object):
    """Files that an attempt writes while it runs: a counter that moves, a note if its memory is nearly full, and the sum of its
    reports.

    `prefix` comes before their names.
    """

    def __init__(self, record, prefix, reports):
        self.record, self.prefix, self.reports = record, prefix, reports
        self.beats, self.due = 0, 0.0
        self.full = False
        self.began = time.monotonic()
        self.sums_due = self.began + BEAT_S

    def beat(self):
        """Move the counter on if it is due, by the monotonic clock."""
        now = time.monotonic()
        if not self.beats or now >= self.due:
            self.beats, self.due = self.beats + 1, now + BEAT_S
            self.record.beat(self.prefix + "beat", str(self.beats))

    def report_metrics(self, name):
        """Write the sum of the reports so far if it is due and there are new ones: seldom, if the attempt runs for long."""
        now = time.monotonic()
        if now >= self.sums_due:
            self.sums_due = now + min(SUMS_LAST_S, max(BEAT_S, (now - self.began) / 20))
            if self.reports.look():
                self.record.beat(name, self.reports.encode())

    def report_memory(self):
        """Note whether the memory is nearly full, for the next start to know if this one is killed."""
        share = 0.0 if pod_failures() is None else memory_share() or 0.0
        full = share >= (MEMORY_FREE if self.full else MEMORY_FULL)
        if full != self.full:
            self.full = full
            self.record.beat(self.prefix + "memory", "%d %%" % (100 * share) if full else "")


def not_started(program, problem):
    """The end of an attempt whose command cannot be started, by the codes of shells: 127 if there is no such program, else 126."""
    gone = getattr(problem, "errno", None) in (errno.ENOENT, errno.ENOTDIR)
    said = problem.strerror if isinstance(problem, OSError) else problem
    return "setup_failed", 127 if gone else 126, {"message": "cannot start %s: %s" % (program, said)}


class CommandAttempt(object):
    """Prepares, runs and ends the command of one index, once."""

    def __init__(self, order, run, number, scratch, asked, binding, gpus=None, leader=None, meeting=None):
        """`leader` is the host of the shim that watches the attempt, if this one runs a single rank of it; `meeting` connects
        it to the shims of other nodes."""
        self.order, self.run, self.number, self.asked = order, run, number, asked
        self.scratch = scratch
        self.binding = binding
        self.gpus = gpus
        self.meeting = meeting
        self.folder = run.attempt_folder(number)
        limit = order.get("time_limit_s")
        self.deadline = keep_native_limit(order, time.time() + limit if limit else None)
        self.checkpoints = (order.get("checkpoint") or {}).get("dir") or os.path.join(run.folder, "checkpoint")
        make_folder(self.checkpoints, within=run.job)
        self.had = find_newest(self.checkpoints)
        self.ranks = Ranks(order, self.folder, leader, meeting and meeting.node)
        self.artifacts: "Any" = None
        """The artifacts that are saved while the command runs, once it does."""
        self.signalled = False
        prefix = meeting.prefix if meeting else run.attempt_name(number) + "/"
        self.life = LifeSigns(run.record, prefix, Reports(os.path.join(self.folder, METRICS)))
        self.disk = DiskUse(disk_limit(), run.record.own_folders())

    def go(self):
        """Run the attempt; returns (reason, exit code, details). No process is left, even after an error here."""
        try:
            failure = self._start_elsewhere() if self.order.get("launch_ranks") else self._start()
            return failure or self._keep_artifacts(self._watch())
        except BaseException:
            self.ranks.end(0)
            raise
        finally:
            self._close()
            self._sum_up()

    def _keep_artifacts(self, end):
        """Save the last version of each artifact, now that no process writes there; returns the attempt's result, which is no
        success if that cannot be done."""
        if self.artifacts is None:
            return end
        reason, code, details = end
        if reason in ("stopped", "preempted"):
            # The end is noted first: saving may take longer than this machine has.
            try:
                self.run.end(self.number, reason, code, details, lambda: True)
            except (IOError, OSError):
                pass  # tried again, patiently, once all is saved
        problem, left_out = self.artifacts.finish(
            reason == "succeeded", lambda: self.asked.stop or self.asked.goes or self.run.cancelled()
        )
        if problem and reason != "succeeded":
            say(problem)
        elif problem:
            return self.asked.end() if self.asked.stop or self.asked.goes else ("setup_failed", 1, {"message": problem})
        elif left_out and reason == "succeeded":
            return reason, code, dict(details, message=left_out)
        return end

    def _close(self):
        """Close the logs. The attempt's end counts, even if a log cannot be completed."""
        try:
            self.ranks.close()
        except Exception as problem:
            say("cannot complete the logs of attempt %d: %s" % (self.number, problem))

    def _sum_up(self):
        """Write the sum of all reports. It is no reason to fail, and a machine that goes leaves no time for all of them."""
        if not self._leads():
            return
        gone = self.asked.stop or self.asked.notice is not None
        try:
            reports = self.life.reports
            reports.finish(SUM_UP_IN_HASTE_S if gone else SUM_UP_S)
            if reports.lines:
                write_whole(os.path.join(self.folder, METRICS_SUM), reports.encode())
        except Exception as problem:
            say("cannot sum up the reports of attempt %d: %s" % (self.number, problem))

    def _start(self):
        """Start all ranks on this machine; returns the result of `go` if that cannot be done, else None."""
        try:
            if self.order.get("gpu_check"):
                from runtime.shim.gpus import check_gpus

                self.binding = dict(self.binding, **check_gpus(self.order["gpu_check"]))
            if self.order.get("container"):
                self._get_image()
            command = self._prepare(self._gives_up)
            if self.ranks.containers is not None:
                self.ranks.containers.note(self.ranks.here)
        except SetupFailed as problem:
            if self.asked.stop or self.asked.notice is not None:
                return self.asked.end()
            if self._is_late():
                return self._timed_out()
            return problem.reason, 1, {"message": str(problem)}
        except NoCapacity as problem:
            return "no_capacity", 1, {"message": str(problem)}
        if self.meeting is not None:
            missed = self._meet(command)
            if missed is not None:
                return missed
        try:
            for rank in self.ranks.here:
                self.ranks.start(rank, command)
        except (OSError, ValueError) as problem:
            self.ranks.end(0)
            return not_started(command.words[0], problem)
        groups = self.ranks.groups()
        try:
            write_whole(os.path.join(self.folder, processes_file(self.ranks.here)), json.dumps(groups), durable=False)
        except (IOError, OSError) as problem:
            say("cannot note the processes of attempt %d: %s" % (self.number, problem.strerror))
        if self.gpus:
            self.gpus.note(groups)
        if command.artifacts is not None:
            self.artifacts = command.artifacts
            self.artifacts.begin()
        return None

    def _meet(self, command):
        """Wait for the other nodes; returns a result like `_start`. The time limit begins when all of them are ready."""
        missed = self.meeting.meet(self.scratch, self.asked)
        self.ranks.address, self.ranks.port = self.meeting.address, self.meeting.port
        if self.meeting.deadline:
            command.environment["RUNTIME_DEADLINE"] = str(int(self.meeting.deadline))
            if self.meeting.leads:
                self.deadline = keep_native_limit(self.order, self.meeting.deadline)
        return missed

    def _get_image(self):
        """Have the engine get the image. The time limit begins after that. Raises `SetupFailed`."""
        from runtime.shim.containers import containers_of, ensure_image, find_engine

        began = time.time()
        engine = find_engine(self.order["container"].get("engine"))
        ensure_image(engine, self.order["container"]["image"], lambda: self.asked.goes or self._is_unwanted())
        if self.deadline:
            self.deadline += time.time() - began
        self.ranks.containers = containers_of(
            self.order, self.run.job, self.run.index, self.folder, self.scratch, engine
        )

    def _prepare(self, gives_up):
        return make_command(
            self.order,
            self.run,
            self.number,
            self.scratch,
            self.checkpoints,
            self.deadline,
            self.binding,
            gives_up,
            self.ranks.containers,
        )

    def _gives_up(self):
        """Whether the command that is being prepared is not wanted any more."""
        return self._is_late() or self._is_unwanted()

    def _is_unwanted(self):
        gone = self.asked.stop or self.asked.notice is not None
        return gone or (self._leads() and self.run.cancelled())

    def _is_late(self):
        """Whether the time limit is over before the command began; that of several nodes begins when all are ready."""
        return self.meeting is None and bool(self.deadline) and time.time() >= self.deadline

    def _start_elsewhere(self):
        """Start the ranks on several machines; returns a result like `_start`."""
        try:
            self.ranks.start_elsewhere(self.run.job, self.run.index, self.number)
        except OSError as problem:
            return not_started(self.order["launch_ranks"][0], problem)
        return None

    def run_rank(self, rank):
        """Run one rank of an attempt that another shim watches; returns the command's exit code."""
        try:
            self.ranks.start(rank, self._prepare(self._is_stopped))
        except (SetupFailed, OSError) as problem:
            write_whole(os.path.join(self.folder, SETUP_FAILED), str(problem))
            return 1
        stopped = False
        child = self.ranks.children[0]
        while child.poll() is None:
            if self._is_stopped():
                self.ranks.end(self.order["grace_s"])
                stopped = True
                break
            if not self.signalled and os.path.exists(os.path.join(self.folder, "ask")):
                self._ask_for_checkpoint()
            reap_orphans()
            time.sleep(LOOK_S)
        self.ranks.kill()
        code = child.wait()
        end_orphans()
        self.ranks.logs.close()
        setup = self.ranks.setup
        if setup.files and not stopped:
            self._hear([code])
        failure = None if stopped or self.asked.stop or self.signalled else setup.find_unreached([(rank, code)])
        setup.forget()
        if failure is not None:
            write_whole(os.path.join(self.folder, SETUP_FAILED), failure)
            return shell_code(code) or 1
        if code and not stopped and not self.asked.stop:
            try:
                create_whole(os.path.join(self.folder, FAILED_RANK), "%d %d" % (rank, shell_code(code)))
            except (AlreadyClaimed, IOError, OSError):
                pass  # another rank failed before; without the file the starter's own exit code counts
        return shell_code(code)

    def _is_stopped(self):
        """Whether a rank of an attempt that another shim watches has to end."""
        return self.asked.stop or os.path.exists(os.path.join(self.folder, "stop"))

    def _watch(self):
        """Watch the command and everything that may end it sooner; returns the attempt's result."""
        quiet = (self._printed(), time.time())
        checkpoint = self.order.get("checkpoint")
        limit, look = (self.order.get("limits") or {}).get("memory_bytes"), 0.0
        pause = SOON_S
        while True:
            codes = self.ranks.poll()
            over = all(code is not None for code in codes)
            if any(codes) and not (over and self.meeting is None):
                # One rank's end ends the others, which would wait for it for ever.
                self._end(self.order["grace_s"])
                return (self.meeting and self.meeting.find_preempted()) or self._judge(codes)
            if over and (self.meeting is None or self.meeting.is_complete()):
                return self._judge(codes)
            elsewhere = self.meeting and self.meeting.find_end()
            if elsewhere:
                self._end(self.order["grace_s"])
                # Ranks fail when they lose a peer, so a notice here explains a failure elsewhere.
                return self.asked.end() if self.asked.notice else elsewhere
            now = time.time()
            reap_orphans()
            if self.asked.due:
                self.asked.due = False
                self.deadline = min(self.deadline or now + 1e9, now + (checkpoint or {}).get("lead_s", 0))
            if self.asked.warned:
                self.asked.warned = False
                self._handle_notice(now)
            self.life.beat()
            self.life.report_memory()
            if self._leads():
                self.life.report_metrics(self.run.attempt_name(self.number) + "/" + METRICS_SUM)
            if self._leads() and self.run.cancelled():
                self._end(self.order["grace_s"])
                return "cancelled", 1, {}
            if self._leads() and self.run.is_overtaken(self.number):
                self._end(self.order["grace_s"])
                return OVERTAKEN
            if self.asked.stop:
                return self._stop(self.order["grace_s"])
            why = self.run.hold and self.run.hold.ends_command()
            if why:
                self._end(self.order["grace_s"])
                return "requeue", 1, {"message": why}
            if self.disk.is_over(DISK_AT_ONCE_S):
                return self._out_of_disk()
            if self.deadline and now >= self.deadline:
                self._end(self.order["grace_s"])
                return self._timed_out()
            soon = self.deadline and checkpoint and now >= self.deadline - checkpoint["lead_s"]
            if (soon or self.asked.checkpoint or (self.meeting and self.meeting.asked)) and not self.signalled:
                self.asked.checkpoint = False  # the request is for this attempt, not for the next one
                self._ask_for_checkpoint()
            idle = self.order.get("idle_timeout_s")
            if idle:
                printed = self._printed()
                if printed != quiet[0]:
                    quiet = (printed, now)
                elif now - quiet[1] >= idle:
                    self._end(self.order["grace_s"])
                    return "idle", 1, {"message": "printed nothing for %d s" % idle}
            if limit and now >= look:
                used = self.ranks.held_memory(limit)
                # A look at many processes takes long; it must be a small part of the time.
                look = now + max(MEMORY_S, 50 * (time.time() - now))
                if used > limit:
                    self._end(0.0)
                    return "oom", 137, {"message": "held %d MiB, its limit is %d MiB" % (used >> 20, limit >> 20)}
            time.sleep(pause)
            pause = min(LOOK_S, pause * 1.5)

    def _ask_for_checkpoint(self):
        self.signalled = True
        name = (self.order.get("checkpoint") or {}).get("signal")
        if self.meeting is not None:
            self.meeting.ask()
        if name:
            self.ranks.ask_for_checkpoint(name)

    def _handle_notice(self, now):
        """Ask for a checkpoint, and move the deadline to the end of the time for it: at once if nothing can ask for one."""
        from runtime.shim.notices import time_for_checkpoint

        grace, lead = self.order["grace_s"], 0.0
        if (self.order.get("checkpoint") or {}).get("signal"):
            self._ask_for_checkpoint()
            lead = self.order["checkpoint"]["lead_s"]
        room = self.asked.notice.end_by(grace) - now
        self.deadline = min(self.deadline or now + 1e9, now + time_for_checkpoint(room, grace, lead))

    def _end(self, grace):
        if self.meeting is None:
            self.ranks.end(grace, self._pass_grace)
            return
        until = time.monotonic() + grace
        self.meeting.stop()
        self.ranks.end(grace, self._pass_grace)
        self.meeting.await_others(until, self.asked, self.life.beat)

    def _leads(self):
        """Whether this shim looks for what ends an attempt from outside; of several nodes only node 0 does."""
        return self.meeting is None or self.meeting.leads

    def _printed(self):
        """A value that changes with the output of any rank."""
        printed = self.ranks.printed()
        return printed if self.meeting is None else self.meeting.share(printed)

    def _pass_grace(self):
        """Give a sign of life; returns whether the machine goes too soon for the rest of the grace period."""
        self.life.beat()
        return self.asked.notice is not None and time.time() >= self.asked.notice.end_by(self.order["grace_s"])

    def _judge(self, codes):
        """The attempt's result, by the codes at the moment when the first rank failed: ranks ended after that have none."""
        self.ranks.kill()  # the rest of the commands' groups
        end_orphans()
        self._hear(codes)
        if self.asked.stop:
            return self._stop(0.0)
        first = next((code for code in codes if code), 0)
        code, failed = shell_code(first), read_system(os.path.join(self.folder, FAILED_RANK)).split()
        if first and len(failed) == 2:
            code = int(failed[1])  # the starter has the highest code, such as that of a rank that it ended
        checkpoint = self.order.get("checkpoint") if self.signalled else None
        died_of = code - 128 if first < 0 or self.ranks.leads else 0  # shims of ranks report signals as shells do
        asked = died_of == getattr(signal, "SIG%s" % (checkpoint or {}).get("signal"), None)
        failure = self.ranks.setup.find_failure([(rank, each) for rank, each in enumerate(codes) if each is not None])
        if failure is not None and not asked:
            # Setup lines that end well by themselves have kept the command from running, too.
            if self.ranks.containers is not None and not os.path.exists(os.path.join(self.folder, SETUP_FAILED)):
                return self._explain_container(self.ranks.containers, codes, code)
            return "setup_failed", code or 1, {"message": failure}
        if not first:
            return "succeeded", 0, {}
        if code == TEMPORARY_FAILURE and os.path.exists(os.path.join(self.folder, PREEMPTED_NOTE)):
            return self._gave_way(code)
        said = self.order["retry"]["on_exit"].get(str(code))
        if self.asked.notice and said is None and (code == TEMPORARY_FAILURE or died_of in ASKING):
            return self.asked.end()
        if said == "succeed":
            return "succeeded", code, {}
        if said == "requeue" or (code == TEMPORARY_FAILURE and said is None):
            free = said is None and self._has_new_checkpoint()
            return "checkpointed" if free else "requeue", code, {}
        if said == "fail":
            return "final_failure", code, {}
        if code == 137 and (ran_out_of_memory() or self.run.record.has(self.run.attempt_name(self.number) + "/oom")):
            return "oom", code, {}
        if checkpoint and self.deadline and time.time() >= self.deadline - checkpoint["lead_s"]:
            if died_of in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM):
                return self._timed_out()
        elif asked:
            # The backend warned of another end than the time limit: a preemption.
            return "stopped", code, {"message": "ended by the signal that asked it for a checkpoint"}
        if self.ranks.count == 1:
            return "app_failed", code, {}
        return "app_failed", code, {"rank": int(failed[0]) if failed else self.ranks.here[codes.index(first)]}

    def _explain_container(self, containers, codes, code):
        """The result if a rank's container did not come to its command, in the words of the engine."""
        self.ranks.logs.close()
        rank = self.ranks.here[next((place for place, each in enumerate(codes) if each), 0)]
        text = containers.explain(read_end(os.path.join(self.folder, "rank%d.log" % rank)))
        # 126 and 127 are the engine's codes for a command of the image that cannot run.
        return "image_failed" if code in (126, 127) else "setup_failed", code or 1, {"message": text}

    def _hear(self, codes):
        """Wait for the signal that ended a command: a backend that signals all processes may reach the command first."""
        until = time.time() + HEAR_S
        if any(code in (-number, 128 + number) for code in codes if code for number in ENDING):
            while not self.asked.stop and time.time() < until:
                time.sleep(0.02)

    def _stop(self, grace):
        """End the attempt as asked. TERM alone has no reason: the backend's own state has it, or the start of the next
        attempt. The shim itself knows how much disk was used."""
        if self.disk.is_over(DISK_LAST_S, now=True):
            return self._out_of_disk()
        self._end(grace)
        return self.asked.end()

    def _gave_way(self, code):
        """The result of a command that left a note of a notice. Its code alone proves nothing: commands may fail with it."""
        text = read_system(os.path.join(self.folder, PREEMPTED_NOTE)).partition("\n")[0][:500].strip()
        said = "gave way to a notice: %s" % text if text else "gave way to a notice"
        return "preempted", code, {"message": said, "lasted_s": round(time.monotonic() - self.life.began, 3)}

    def _out_of_disk(self):
        """Note the end first: a node that evicts for its disk gives a second."""
        message = "used %d MiB of disk, its limit is %d MiB" % (self.disk.used >> 20, self.disk.limit >> 20)
        details = {"message": message}
        try:
            self.run.end(self.number, "disk", 1, details, lambda: True)
        except (IOError, OSError):
            pass  # tried again, patiently, once the command has ended
        self._end(0.0)
        return "disk", 1, details

    def _timed_out(self):
        if self.asked.notice:
            return self.asked.end()
        if self._has_new_checkpoint():
            return "checkpointed", 124, {"message": "time limit, after a new checkpoint"}
        return "timeout", 124, {}

    def _has_new_checkpoint(self):
        newest = find_newest(self.checkpoints)
        return newest is not None and newest != self.had


def processes_file(ranks):
    """The file of an attempt's folder with the process groups of these ranks of one machine."""
    return "processes.json" if ranks[0] == 0 else "processes.%d.json" % ranks[0]


def read_end(path, size=4096):
    """The end of a file as text; empty if it cannot be read."""
    try:
        with io.open(path, "rb") as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - size))
            return opened.read().decode("utf-8", "replace")
    except (IOError, OSError):
        return ""


def find_newest(folder):
    """The newest time and the number of files below, which differ between checkpoints."""
    newest, count = 0.0, 0
    for place, _, names in walk(folder):
        for name in names:
            try:
                newest = max(newest, os.stat(os.path.join(place, name)).st_mtime)
                count += 1
            except OSError:
                continue
    return (newest, count) if count else None
