"""One attempt at a time, in a child of the guardian: the loop over orders, and the steps around the user's code.

The child reads orders from its control socket and answers each in turn. It runs functions and workflows itself and
spawns commands, whose parent it stays. It is the subreaper of all their processes, so `waitpid` shows at the end of an
attempt whether any of them still lives. docs/attempts.md describes the view of user code.

Every fresh attempt pays for what this module loads; user code should find a bare Python.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
import termios
import time

from runtime import faults
from runtime.shim.call import handle
from runtime.worker.attempts import entries, processes, scratch, wire, work_trees
from runtime.worker.attempts.entries import AttemptFailed, AttemptStopped
from runtime.worker.attempts.environment import ProcessEnvironment

TYPE_CHECKING = False
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

    from runtime.worker.attempts.context import Attempt


class Execution:
    """The attempt that runs, as its context sees it: folders, progress, and whether it is asked to stop."""

    def __init__(self, fields: list[str], started: float, control: wire.ControlSocket) -> None:
        self.fields, self._control = fields, control
        self.deadline = started + float(fields[5]) if fields[5] else 0.0
        """Seconds since the epoch; 0.0 without a time limit."""
        self.output_dir, self.checkpoint_dir = fields[6], fields[7]
        self.context: Attempt | None = None
        self.looks_at_stop = False
        """Whether user code has asked its context whether to stop; then SIGTERM raises nothing in it."""
        self.stop_signalled = False
        self.in_user_code = self.ran_user_code = False
        self.metrics: dict[str, float] = {}
        self.progressed = False
        self.keeps_tree = False
        """Whether the worker looks at the attempt's tree after its end, and removes it then."""
        self._unsent = b""
        self._sent_at = 0.0
        self._made_scratch = self._made_output = False

    # folders

    @property
    def reports_path(self) -> str:
        return f"{self.scratch_dir}{scratch.METRICS}" if self.scratch_dir else ""

    @property
    def scratch_dir(self) -> str:
        return f"{self.fields[8]}/{self.fields[0]}" if self.fields[8] else ""

    def make_output(self) -> str:
        if self.output_dir:
            self._made_output = True
            scratch.make_folder(self.output_dir)
        return self.output_dir

    def make_scratch(self) -> str:
        if self.scratch_dir and not self._made_scratch:
            self._made_scratch = True
            scratch.make_folder(self.scratch_dir)
        return self.scratch_dir

    def remove_folders(self) -> None:
        if self._made_scratch:
            scratch.remove_tree(self.scratch_dir)
        if self._made_output:
            scratch.remove_empty(self.output_dir, parents=1)

    def read_origin(self) -> dict[str, Any]:
        return {}  # the file of the snapshot has it

    # stopping

    def stop_reason(self) -> str:
        """Return why the worker asks the attempt to stop; empty as long as it does not. Only user code calls this."""
        self.looks_at_stop = True
        if self._control.order_to_stop() == self._control.begun:
            return self._control.stop_reason()
        return "other" if self.stop_signalled else ""

    def is_asked_to_stop(self) -> bool:
        return self.stop_signalled or self._control.order_to_stop() == self._control.begun

    # progress

    def record_progress(self, done: float | None = None, *_: object) -> None:
        """Report to the worker, at most twice a second; the last report is always passed on."""
        if os.getpid() != self._control.pid:
            return
        self.progressed = self.progressed or done is not None
        self._unsent = wire.encode_json({"progressed": self.progressed, "metrics": self.metrics}).encode()
        now = time.monotonic()
        if now - self._sent_at >= 0.5:
            self._sent_at = now
            self.send_progress()

    def send_progress(self) -> None:
        """Send the last report if the worker does not have it."""
        payload, self._unsent = self._unsent, b""
        if payload:
            self._control.send_progress(payload)


class ChildServer:
    """Serves orders until its socket ends, it is held, or it must be replaced.

    The guardian makes one and forks it many times: attributes that are set here cost nothing in the children, while each
    page of memory that a child writes to is copied first, which is most of the price of a fresh attempt.
    """

    def __init__(self, page: mmap.mmap, *, reuse: bool, max_tasks: int, max_growth_bytes: int) -> None:
        self.control, self.environment = wire.ControlSocket(page), ProcessEnvironment(self._on_term)
        self.execution: Execution | None = None
        """The order that the child began last."""
        self._reuse, self._max_tasks, self._max_growth_bytes = reuse, max_tasks, max_growth_bytes
        self._functions_run = 0
        self._command_rss_bytes = 0
        self._tree: work_trees.WorkTree | None = None
        self._loaded: dict[str, Callable[..., object]] = {}
        self._must_retire = False
        self._settled_rss_bytes = 0
        self._checked_at = time.monotonic()

    def serve(self, cell: int) -> NoReturn:
        """Serve orders, right after the fork, with output on 1 and 2 and the control socket on 3."""
        self.control.open(cell)
        self.environment.set_handlers()
        handle(signal.SIGTERM, self._on_term)
        while True:
            fields = self.control.next_order()
            # Before the order counts as begun: its time limit is for the submitted code.
            unprepared = self._lay_out(fields[10])
            started = time.time()
            self.control.begin(started)
            # After the count, so that a SIGTERM that was meant for the attempt before does not mark this one.
            self.execution = Execution(fields, started, self.control)
            self._run(self.execution, started, unprepared)

    def _lay_out(self, code_dir: str) -> str | None:
        """Restore the tree of the code as it was submitted; returns the problem if that fails."""
        if not code_dir:
            return None
        if self._tree is None or self._tree.folder != code_dir:
            self._tree = work_trees.WorkTree(code_dir)
        try:
            self._tree.prepare()
        except Exception as problem:  # a full disk, or files that another attempt has damaged
            return f"cannot lay out the code: {entries.describe(problem)}"
        return None

    def _run(self, execution: Execution, started: float, unprepared: str | None) -> None:
        details: dict[str, Any] | None = None
        value = ""
        functions = in_container = False
        self._command_rss_bytes = 0
        try:
            if unprepared is not None:
                raise AttemptFailed("setup_failed", unprepared)
            self.environment.prepare(execution.fields, execution.deadline)
            faults.reach("attempt.started")
            body = entries.parse_object(execution.fields[wire.ORDER_FIELDS])
            if body.get("artifacts"):
                execution.keeps_tree = True
                work_trees.take_artifacts(body["artifacts"], f"{execution.scratch_dir}.artifacts", execution.fields[10])
            if self.environment.container:
                from runtime.worker.attempts import container_attempt

                in_container = True
                value = container_attempt.run(execution, self.environment, body)
            elif "command" in body:
                self._run_command(execution, body["command"])
            elif self.environment.python:
                value = self._call_elsewhere(execution, body)
            else:
                functions = True
                value = self._run_python(execution, body)
        except AttemptFailed as failure:
            details = failure.details
        except AttemptStopped as stopped:
            details = {"outcome": "app_failed", "message": str(stopped.args[0] if stopped.args else "stopped")}
        except BaseException as problem:
            entries.show(problem, problem.__traceback__)
            # `setup_failed` means that no user code has run, and that the same attempt may begin again.
            outcome = "app_failed" if execution.ran_user_code else "setup_failed"
            details = {"outcome": outcome, "message": entries.describe(problem)}
        if os.getpid() != self.control.pid:
            # This process was forked by the attempt and has returned from the user's code: it is not an attempt.
            entries.flush()
            os._exit(1 if details else 0)
        measured = not in_container and (self._functions_run == 1 or (functions and not self._reuse))
        self._finish(execution, details, value, started, functions=functions, measured=measured)

    def _finish(
        self,
        execution: Execution,
        details: dict[str, Any] | None,
        value: str,
        started: float,
        *,
        functions: bool,
        measured: bool,
    ) -> None:
        fresh = functions and not self._reuse
        self.control.mark_over()
        retires = fresh or self._must_retire or self.environment.fenced or (functions and self._is_worn())
        flags = 0 if self.environment.restore_streams() and not retires else wire.RETIRES
        self._end_descendants()
        try:
            if self._tree is not None and not execution.keeps_tree:
                self._tidy(self._tree, execution.fields[9])
            execution.remove_folders()
        except Exception as problem:  # how the attempt ended counts all the same
            entries.print_error(f"runtime: cannot tidy up after the attempt: {entries.describe(problem)}")
        if not flags:
            self.environment.restore()
            if _has_output():
                flags = wire.WAITS
        execution.send_progress()
        ended = time.time()
        # Several functions in one process have no peaks of their own.
        peak = self._command_rss_bytes or (_max_rss_bytes() if measured else 0)
        payload = b""
        imported = self.environment.list_imported() if fresh else ()
        if details is not None or value or execution.metrics or execution.progressed or imported:
            flags |= wire.DETAILED
            details = details or {"outcome": "succeeded"}
            if execution.metrics:
                details["metrics"] = execution.metrics
            if execution.progressed:
                details["progressed"] = True
            if imported:
                details["imported"] = imported
            payload = wire.encode_report(details, value)
        self.control.send_result(flags, started, ended, peak, payload)
        if flags & wire.RETIRES:
            os._exit(wire.CLEAN_EXIT)
        if flags & wire.WAITS:
            self.control.wait_to_go_on()

    # around the user's code

    def _is_worn(self) -> bool:
        if self._functions_run >= self._max_tasks:
            return True
        if self._functions_run == 1:
            # Growth counts from here: imports of the first function stay for the others.
            self._settled_rss_bytes = processes.own_rss_bytes()
        now = time.monotonic()
        if now - self._checked_at < 0.25:
            return False
        self._checked_at = now
        return processes.own_rss_bytes() - self._settled_rss_bytes > self._max_growth_bytes

    def _end_descendants(self) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        count = processes.end_tree(self.control.pid)
        if count:
            noun = "process" if count == 1 else "processes"
            os.write(2, f"runtime: ended {count} {noun} that the attempt had left running\n".encode())

    def _tidy(self, tree: work_trees.WorkTree, cwd: str) -> None:
        if cwd:
            scratch.remove_empty(cwd, parents=cwd.count("/", len(tree.folder) + 1))
        try:
            left = tree.tidy()
        except OSError:
            return  # The next attempt in this tree finds out.
        if left:
            names = ", ".join(left[:3]) + (", …" if len(left) > 3 else "")
            what = f"`{names}` goes" if len(left) == 1 else f"{len(left)} files and folders ({names}) go"
            entries.print_error(f"runtime: {what} with the attempt's copy of the code; $RUNTIME_OUTPUT_DIR is kept")

    # the three kinds of entries

    def _run_python(self, execution: Execution, body: dict[str, Any]) -> str:
        """Call the function or workflow and return its value as JSON text; empty for None."""
        self._functions_run += 1
        execution.in_user_code = execution.ran_user_code = True
        try:
            if execution.is_asked_to_stop():
                raise AttemptStopped("stopped before it began")
            if "workflow" in body:
                returned = _call_workflow(execution, body, self.environment.started_in)
            else:
                returned = self._call_function(body)
            if not self._reuse or _left_threads():
                self._must_retire = True
                entries.leave_python()
        except AttemptFailed:
            raise
        except BaseException as problem:
            execution.in_user_code = False
            raise entries.explain(problem, problem.__traceback__) from None
        finally:
            execution.in_user_code = False
        if returned is None:
            return ""
        return entries.encode_value(returned, strict="workflow" not in body)

    def _call_function(self, body: dict[str, Any]) -> object:
        name: str = body["function"]
        function = self._loaded.get(name)
        if function is None:
            function = self._loaded[name] = entries.load_function(name)
        args, kwargs = body.get("args"), body.get("kwargs")
        if kwargs:
            return function(*(args or ()), **kwargs)
        if args:
            return function(*args)
        return function()

    def _call_elsewhere(self, execution: Execution, body: dict[str, Any]) -> str:
        """Call the function or workflow in the Python of the task's environment, and return its value as JSON text."""
        from runtime.worker.attempts import interpreter_call

        folder = execution.make_scratch()
        python, started_in = self.environment.python, self.environment.started_in
        call = interpreter_call.InterpreterCall(python, f"{folder}/.runtime-call", body, started_in)
        call.write()
        try:
            self._run_command(execution, call.argv, without=b"PYTHONPATH")
        except AttemptFailed as failure:
            raise call.explain(failure) from None
        return call.read_value()

    def _run_command(self, execution: Execution, argv: list[str], *, without: bytes = b"") -> None:
        variables = self.environment.variables
        environ = dict(variables) if variables else {os.fsencode(k): os.fsencode(v) for k, v in os.environ.items()}
        if execution.make_scratch():
            environ[b"TMPDIR"] = os.fsencode(execution.scratch_dir)
        execution.make_output()
        environ.pop(without, None)
        if execution.is_asked_to_stop():
            raise AttemptStopped("stopped before it began")
        pid = entries.spawn(argv, environ)
        execution.ran_user_code = True
        self.control.record_command(pid)
        if execution.is_asked_to_stop():
            # The guardian may have looked for the command before its pid was in the cell.
            processes.send_signal([pid], signal.SIGTERM)
        try:
            while True:
                ended, status, usage = os.wait4(-1, 0)
                if ended == pid:
                    self._command_rss_bytes = usage.ru_maxrss * _RSS_UNIT_BYTES
                    break
        finally:
            self.control.record_command(0)
        entries.explain_status(os.waitstatus_to_exitcode(status))

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self.control.pid:
            # A process that the attempt forked has this handler too, and ends as it would without.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        execution, meant = self.execution, self.control.order_to_stop()
        if execution is None or (meant and meant != self.control.begun):
            return  # Sent for an attempt that has ended meanwhile.
        first, execution.stop_signalled = not execution.stop_signalled, True
        if first and execution.in_user_code and not execution.looks_at_stop:
            raise AttemptStopped(f"stopped by signal {signum} (SIGTERM)")


_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


def _call_workflow(execution: Execution, body: dict[str, Any], started_in: str | None) -> object:
    from runtime.errors import RequestRefused
    from runtime.tasks.model import WorkflowEntry
    from runtime.tasks.workflows import load

    os.environ["TMPDIR"] = execution.make_scratch() or os.environ.get("TMPDIR", "/tmp")
    execution.make_output()
    sys.argv = [body["workflow"], *(body.get("args") or ())]
    try:
        entry = WorkflowEntry(body["project"], body["workflow"], tuple(body.get("args") or ()))
        call = load(entry, started_in=started_in)
    except RequestRefused as refusal:
        entries.print_error(refusal.render())
        raise AttemptFailed("config_invalid", "; ".join((refusal.message, *refusal.facts))) from None
    return call()


def _left_threads() -> bool:
    """Whether the attempt has threads that Python would wait for at exit."""
    threading = sys.modules.get("threading")
    if threading is None or threading.active_count() == 1:
        return False
    return any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate())


def _has_output() -> bool:
    """Whether the pipe still holds output, which is then this attempt's."""
    if sys.platform != "linux":
        return True
    try:
        return fcntl.ioctl(1, termios.FIONREAD, b"\0\0\0\0") != b"\0\0\0\0"
    except OSError:
        return False


def _max_rss_bytes() -> int:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * _RSS_UNIT_BYTES
