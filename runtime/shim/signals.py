"""Signals to this shim, kept until it looks."""

import signal
import time

from runtime.shim.words import LOOK_S

ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Asked(object):
    """Requests that came by signals."""

    def __init__(self):
        self.stop = False
        self.checkpoint = False
        self.due = False
        self.why = ""
        for number in ENDING:
            signal.signal(number, self._stop)
        for name in ("SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), self._checkpoint)
        signal.signal(signal.SIGALRM, self._due)

    def take(self):
        """The signals that ask for a checkpoint or say that time is up, for shims that others of ours started."""
        names = [signal.SIGUSR1] * self.checkpoint + [signal.SIGALRM] * self.due
        self.checkpoint = self.due = False
        return names

    def _stop(self, number, frame):
        self.stop = True
        self.why = self.why or signal.Signals(number).name

    def _checkpoint(self, number, frame):
        self.checkpoint = True

    def _due(self, number, frame):
        """The time limit is taken to be near, for rehearsals: as far away as a checkpoint's lead."""
        self.due = True


def stops_within(seconds, asked, give_up=lambda: False):
    """Wait for `seconds`, or until we are asked to stop or `give_up()`. Whether we were asked."""
    until = time.time() + seconds
    while time.time() < until and not asked.stop and not give_up():
        time.sleep(min(LOOK_S, max(0.0, until - time.time())))
    return asked.stop
