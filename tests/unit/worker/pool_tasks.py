"""Functions for the attempts in the attempt pool's tests; imported in children only."""

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import runtime.worker.attempts.context


def nothing():
    pass


def echo(*args, **kwargs):
    return {"args": list(args), "kwargs": kwargs}


def say(text="hi\n", count=1):
    sys.stdout.write(text * count)


def close_output():
    sys.stdout.close()


def say_raw():
    os.write(1, b"\xff\x00raw, no end of line")
    os.write(2, b"|and stderr")


def say_and_wait(text, path):
    print(text)
    wait_for(path)


def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.005)


def fail(text="boom"):
    raise ValueError(text)


def leave(code):
    sys.exit(code)


def leave_at_once(code):
    os._exit(code)


def interrupt():
    raise KeyboardInterrupt


def die(signum):
    os.kill(os.getpid(), signum)
    time.sleep(600)


def signal_guardian(signum, path=None):
    """Signal the process that started this one."""
    os.kill(os.getppid(), signum)
    if path:
        Path(path).touch()
    time.sleep(600)


def write_stray(text, count=1, then="return"):
    """Write to every descriptor that a process may have beyond its output."""
    for fd in range(3, 20):
        try:
            os.write(fd, text.encode() * count)
        except OSError:
            pass
    if then == "hang":
        time.sleep(600)
    if then == "exit":
        os._exit(0)
    if then == "flood":
        while True:
            os.write(3, b"x" * 65536)


def announce_result(length):
    """Send a valid beginning of a frame, and never the rest."""
    from runtime.worker.attempts import wire

    os.write(3, wire.RESULT_HEADER.pack(wire.MAGIC, length, wire.RESULT, 0, 0.0, 0.0, 0))


def close_control(path=None, then="return"):
    os.closerange(3, 256)
    if path:
        # Takes over the descriptor's number.
        return os.open(path, os.O_WRONLY | os.O_CREAT)
    if then == "progress":
        runtime.worker.attempts.context.current_attempt().progress(1)
        time.sleep(600)
    if then == "hang":
        time.sleep(600)
    return None


def steal_orders(path, size):
    """Read the socket's next `size` bytes at most."""
    wait_for(path)
    return len(os.read(3, size))


def crash():
    import ctypes

    ctypes.string_at(0)


def exhaust():
    return bytearray(1 << 60)


def hold(size, path):
    held = bytearray(size)
    held[::4096] = b"x" * len(held[::4096])
    wait_for(path)


def hold_when_stopped(size, path):
    signal.signal(signal.SIGTERM, lambda *_: hold(size, f"{path}.never"))
    Path(path).write_text("up")
    time.sleep(600)


def odd_value():
    return {1, 2}


def long_number():
    return 10**5000


def deep():
    value = []
    for _ in range(100_000):
        value = [value]
    return value


def odd_but_fine(name):
    return {"nan": [float("nan"), float("inf")], "surrogate": ["a\udcff"], "nul": ["a\0"]}[name]


def spoil_metrics():
    runtime.worker.attempts.context.current_attempt().metrics["loss"] = object()


def unlimited_number():
    """Return a long number, as on a machine whose interpreter has no limit."""
    sys.set_int_max_str_digits(0)
    return 10**5000


def unreadable_details():
    sys.set_int_max_str_digits(0)
    runtime.worker.attempts.context.current_attempt().metrics["n"] = 10**5000


def undecodable_progress():
    sys.set_int_max_str_digits(0)
    attempt = runtime.worker.attempts.context.current_attempt()
    attempt.progress(1, total=2)
    attempt._execution._sent_at = 0.0
    attempt.metrics["n"] = 10**5000
    attempt._execution.record_progress(1)
    del attempt.metrics["n"]


def broken_details():
    runtime.worker.attempts.context.current_attempt().metrics["n"] = {"a": 1}


def sleep(seconds=600.0):
    time.sleep(seconds)


def stubborn(path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(path).write_text("up")
    time.sleep(600)


def careful(path):
    """Leave a note in the `finally` block when stopped."""
    try:
        Path(f"{path}.up").write_text("up")
        time.sleep(600)
    finally:
        Path(path).write_text("left in good order")


def saves_checkpoint(path):
    current = runtime.worker.attempts.context.current_attempt()
    while not current.should_stop():
        Path(f"{path}.up").write_text("up")
        time.sleep(0.005)
    return current.stop_reason


def leaves_checkpoint():
    Path(runtime.worker.attempts.context.current_attempt().checkpoint_dir, "step-1").write_text("state")
    raise RuntimeError("after the checkpoint")


def describe_attempt():
    current = runtime.worker.attempts.context.current_attempt()
    return {
        "task_id": current.task_id,
        "attempt": current.attempt,
        "token": current.token,
        "experiment": current.experiment,
        "generation": current.generation,
        "deadline": current.deadline and current.deadline.timestamp(),
        "environ": {name: value for name, value in os.environ.items() if name.startswith(("RUNTIME_", "EXTRA"))},
        "unbuffered": os.environ.get("PYTHONUNBUFFERED"),
        "cwd": str(Path.cwd()),
    }


def count_up(path):
    current = runtime.worker.attempts.context.current_attempt()
    current.progress(1, total=3, text="first", loss=0.5)
    wait_for(path)
    current.progress(2, total=3)
    current.report(loss=0.25, accuracy=1)


def use_folders(scratch=True, output=True):
    current = runtime.worker.attempts.context.current_attempt()
    if scratch:
        Path(current.scratch_dir, "deep").mkdir()
        Path(current.scratch_dir, "deep", "file").write_text("x")
    if output:
        Path(current.output_dir, "result.txt").write_text("done")
    else:
        assert current.output_dir.is_dir()


def list_fds():
    return sorted(int(fd.name) for fd in list(Path("/proc/self/fd").iterdir()) if fd.exists())


def describe_stdin():
    return [str(Path("/proc/self/fd/0").readlink()), sys.stdin.read()]


def describe_interpreter():
    return {"wakeup_fd": signal.set_wakeup_fd(-1), "collects": gc.isenabled(), "argv": sys.argv}


def own_pid():
    return os.getpid()


def count_calls(calls=[]):  # noqa: B006 (state that a warm process keeps)
    calls.append(1)
    return len(calls)


def spoil():
    os.environ["EXTRA_SPOILED"] = "yes"
    os.environ["HOME"] = "/nowhere"
    os.chdir("/")
    os.umask(0o077)
    sys.path.insert(0, "/nowhere")
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(600)


def look():
    umask = os.umask(0o022)
    os.umask(umask)
    print("seen")
    return {
        "extra": os.environ.get("EXTRA_SPOILED"),
        "child": subprocess.check_output(["sh", "-c", "echo $EXTRA_SPOILED-$HOME"], text=True),
        "home": os.environ.get("HOME"),
        "cwd": str(Path.cwd()),
        "umask": umask,
        "path": "/nowhere" in sys.path,
        "term": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
        "alarm": signal.getitimer(signal.ITIMER_REAL)[0],
    }


def start_child(path):
    """Start a plain subprocess that outlives the function."""
    Path(path).write_text(str(subprocess.Popen(["sleep", "300"]).pid))


DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
for fd in (0, 1, 2): os.close(fd)
open(sys.argv[1] + ".part", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(300)
"""


def start_daemon(path, scrub=False, then="return"):
    """Start an orphaned grandchild in its own session; `scrub` empties its environment."""
    environ = {"PATH": os.environ["PATH"]} if scrub else None
    subprocess.run([sys.executable, "-c", DAEMON, path], env=environ, check=True)
    wait_for(path)
    if then == "hang":
        time.sleep(300)
    if then == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if then.startswith("exit"):
        os._exit(int(then.removeprefix("exit ")))


def fork_and_return():
    """Return in the forked copy, too."""
    if os.fork() == 0:
        return "child"
    os.wait()
    return "parent"


def leave_thread(path):
    threading.Thread(target=lambda: (time.sleep(0.2), Path(path).write_text("thread done"))).start()


def at_exit(path):
    atexit.register(lambda: Path(path).write_text("exit handler ran"))


def make_temporary():
    with tempfile.NamedTemporaryFile() as file:
        return file.name


def grow(size, kept=[]):  # noqa: B006
    kept.append(bytearray(size))
    kept[-1][::4096] = b"x" * len(kept[-1][::4096])
    time.sleep(0.3)
    return os.getpid()


def large(size):
    return "x" * size


def note(path):
    with Path(path).open("a") as file:
        file.write(json.dumps([time.time(), os.environ["RUNTIME_TASK_ID"]]) + "\n")


def stop_guardian(signum=signal.SIGSTOP):
    """Stop the guardian and go on without it."""
    os.kill(os.getppid(), signum)
    return "done"


def never_leave(how):
    """Make the process hang after the attempt has ended: stopped, or asleep forever."""
    os._exit = lambda code: os.kill(os.getpid(), signal.SIGSTOP) if how == "stopped" else time.sleep(600)


def read_no_more():
    """Make the process block on the descriptor for orders."""
    read = os.read
    os.read = lambda fd, size: time.sleep(600) if fd == 3 else read(fd, size)


def spoil_json():
    json.dumps = json.loads = lambda *args, **kwargs: "garbage"


def spoil_folders():
    def refuse(path):
        raise OSError(24, "Too many open files")

    os.chdir = refuse


def spoil_reports():
    from runtime.worker.attempts import wire

    wire.DETAIL_HEADER = wire.STOP


class Untold:
    def __str__(self):
        raise RuntimeError("no text")


def leave_untold():
    sys.exit(Untold())
