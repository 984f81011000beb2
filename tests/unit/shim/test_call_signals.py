"""Handlers of an attempt are its own: a process that it forks ends by a signal, even by one that comes right after the fork."""

from __future__ import annotations

import subprocess
import sys

from tests.services_support import PATIENCE_S

PROGRAM = """
import os, signal, sys, time
from runtime.shim.call import handle

heard = []
handle(signal.SIGTERM, lambda *_: heard.append(os.getpid()))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
ends = set()
for _ in range(300):
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(3)
    os.kill(pid, signal.SIGTERM)
    ends.add(os.WTERMSIG(os.waitpid(pid, 0)[1]))
os.kill(os.getpid(), signal.SIGTERM)
print(ends == {signal.SIGTERM}, heard == [os.getpid()], signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGUSR1})

signal.signal(signal.SIGTERM, lambda *_: os._exit(7))  # the code's own handler is its children's, too
out, into = os.pipe()
pid = os.fork()
if pid == 0:
    os.write(into, b"x")
    time.sleep(30)
os.read(out, 1)
os.kill(pid, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_process_that_an_attempt_forks_ends_by_sigterm_however_early_it_comes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert done.stdout.split() == ["True", "True", "True", "7"]
