"""Runs a shim apart from the Ray worker that starts it: `detach.py LIFELINE REPORT LOG WORDS…`.

Ray kills the children of a worker that ends, without notice, and a shim that is killed leaves its command running. The shim
is no child of the worker, and gets TERM, with its grace, once the other end of the pipe LIFELINE is written to or closed. Its
exit code goes into the pipe REPORT. Both are numbers of open files. The standard library is all that it needs.
"""

import os
import select
import signal
import subprocess
import sys

_LOOK_S = 0.1


def main(lifeline: int, report: int, log: str, words: "list[str]") -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    # Ray blocks signals in its workers, and masks are inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if log else None
    shim = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    watched = [lifeline]
    while shim.poll() is None:
        if select.select(watched, [], [], _LOOK_S)[0]:
            if not os.read(lifeline, 1):
                watched = []
            shim.terminate()
    code = shim.returncode if shim.returncode >= 0 else 128 - shim.returncode
    try:
        os.write(report, b"%d" % code)
    except OSError:
        pass  # the worker has gone


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
