"""Every command of Slurm that we run, on whichever host it runs; one method each."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Final

from runtime.errors import InfrastructureFailure
from runtime.launchers.hosts import Answer, Host
from runtime.launchers.slurm import states
from runtime.launchers.slurm.settings import SlurmSettings

# Variables of this kind change what the commands do, and SBATCH_* beat even options in the script. What says where
# Slurm is stays.
SCRUB: Final = (
    "for name in $(env | sed -n 's/^\\(\\(SLURM\\|SBATCH\\|SALLOC\\|SQUEUE\\|SACCT\\|SCANCEL\\|SCONTROL\\|SINFO\\)_[A-Za-z0-9_]*\\)=.*/\\1/p'); do\n"
    "  case $name in SLURM_CONF|SLURM_CONF_SERVER|SLURM_JWT) ;; *) unset $name ;; esac\n"
    "done\n"
    "export LC_ALL=C SLURM_TIME_FORMAT=standard\n"
)
# What has begun is on disk before sbatch runs, and its answer is on disk whoever waits for it.
SUBMIT: Final = (
    'mkdir -p "${1%/*}" && mkdir "$1" 2>/dev/null || exit 0\n'
    'try=$1; shift; echo "$$ $(hostname)" >"$try/who"\n'
    '"$@" >"$try/out" 2>"$try/err" </dev/null\n'
    'echo $? >"$try/code.new"; mv "$try/code.new" "$try/code"\n'
)
_ALIVE: Final = (
    'read pid where <"$1/who" || exit 3\n[ "$where" = "$(hostname)" ] || exit 2\n'
    'case "$(ps -o stat= -p "$pid" 2>/dev/null)" in ""|Z*) exit 1 ;; esac\n'
)
_NOT_FOUND: Final = "Invalid job id"
_NO_ACCOUNTING: Final = ("accounting storage is disabled", "accounting_storage/none", "not running a supported")
_NO_ANSWER: Final = (
    "unable to contact",
    "socket timed out",
    "connection refused",
    "communication connection failure",
    "zero bytes were transmitted",
    "temporarily unable",
    "slurmctld: connect failure",
    "transport endpoint",
)
_ID: Final = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+)?")
LOOK_S: Final = 30.0
"""How long squeue may take. Slurm itself gives up a controller that is down after some ten seconds, but one whose host
is silent only after minutes."""
HISTORY: Final = "now-30days"
"""How far back accounting is asked for a name; a launch that lost its answer is tried again sooner."""


class SlurmUnavailable(InfrastructureFailure):
    """Slurm does not answer: nothing is known about any job."""


class SlurmClient:
    def __init__(self, host: Host, settings: SlurmSettings) -> None:
        self._host, self._settings = host, settings

    def run(self, *words: str, timeout_s: float = 60) -> Answer:
        """A command with a clean environment."""
        return self._host.run(self._clean(words), timeout_s=timeout_s)

    def _clean(self, words: Sequence[str], then: str = 'exec "$@"\n') -> list[str]:
        lines = SCRUB
        if self._settings.bin:
            lines += f"PATH={shlex.quote(self._settings.bin)}:$PATH\n"
        if self._settings.slurm_conf:
            lines += f"export SLURM_CONF={shlex.quote(self._settings.slurm_conf)}\n"
        return ["sh", "-c", lines + then, "slurm", *words]

    # looking

    def queue(self, ids: Sequence[str]) -> list[states.Row]:
        """What the queue has of these jobs, tasks of arrays one by one."""
        rows = self._queue("--jobs", ids, "--local")
        # Of a federation another cluster may have it now, and that is asked for only then: each question to a controller
        # that is down takes its time.
        elsewhere = sorted({row.job for row in rows if row.state == "REVOKED"})
        found = self._queue("--jobs", elsewhere) if elsewhere else []
        return [*(row for row in rows if row.job not in {each.job for each in found}), *found]

    def queue_named(self, names: Sequence[str]) -> list[states.Row]:
        return self._queue("--name", names, "--local")

    def _queue(self, option: str, values: Sequence[str], *more: str) -> list[states.Row]:
        rows: list[states.Row] = []
        for some in _chunks(values):
            words = ("-h", "-r", "-t", "all", "-o", states.SQUEUE_FORMAT, *more, f"{option}={','.join(some)}")
            answer = self.run("squeue", *words, timeout_s=LOOK_S)
            if answer.code != 0 and _NOT_FOUND not in answer.err:
                raise _unavailable("squeue", answer)
            rows += states.parse_squeue(answer.out)
        return rows

    def accounting(self, ids: Sequence[str]) -> list[states.Row] | None:
        """What accounting remembers of these jobs; None where there is none. Raises `SlurmUnavailable`."""
        return self._accounting("--jobs", ids)

    def accounting_named(self, names: Sequence[str]) -> list[states.Row] | None:
        return self._accounting("--name", names, "-S", HISTORY)

    def _accounting(self, option: str, values: Sequence[str], *more: str) -> list[states.Row] | None:
        rows: list[states.Row] = []
        for some in _chunks(values):
            words = ("-X", "-n", "-P", f"--format={states.SACCT_FORMAT}", *more, f"{option}={','.join(some)}")
            answer = self.run("sacct", *words)
            said = answer.err.lower()
            if answer.code == 127 or any(each in said for each in _NO_ACCOUNTING):
                return None
            if answer.code != 0 or "error" in said:
                raise _unavailable("sacct", answer)
            rows += states.parse_sacct(answer.out)
        return rows

    def partitions(self) -> list[str]:
        """Names of the partitions; empty where nobody says."""
        return sorted({line.strip().rstrip("*") for line in self.run("sinfo", "-h", "-o", "%P").out.splitlines()})

    def names_of(self, kind: str) -> list[str]:
        """Names of accounts or QOS (`account`, `qos`) that this user may name; empty where nobody says."""
        answer = self.run("sh", "-c", f'sacctmgr -n -P show assoc user="$(id -un)" format={kind}')
        names = {name for line in answer.out.splitlines() for name in line.strip().split(",") if name}
        return sorted(names) if answer.code == 0 else []

    def configuration(self, name: str) -> str | None:
        """A value of `scontrol show config`."""
        for line in self.run("scontrol", "show", "config").out.splitlines():
            key, _, value = line.partition("=")
            if key.strip() == name:
                return value.strip()
        return None

    def show_job(self, native: str) -> str:
        return self.run("scontrol", "-o", "show", "job", native).out

    def nodes(self) -> str:
        """A line for each sort of node: partition, state, CPUs, MB, GPUs, features, how many."""
        return self.run("sinfo", "-h", "-e", "-o", "%P|%T|%c|%m|%G|%f|%D").out

    # submitting

    def start_sbatch(self, words: Sequence[str], attempt: str, folder: str) -> None:
        """Run sbatch in a process that outlives us; what it answers is left in the folder `attempt`. Only the first
        call for an attempt runs it."""
        self._host.spawn(self._clean([attempt, *words], SUBMIT), folder=folder, log=f"{folder}/submit.log")

    def sbatch_lives(self, attempt: str) -> bool | None:
        """Whether the process of this attempt still runs; None where it cannot be seen from here."""
        code = self._host.run(["sh", "-c", _ALIVE, "alive", attempt]).code
        return None if code == 2 else code == 0

    # acting

    def cancel(self, ids: Sequence[str]) -> Answer:
        return self.run("scancel", *ids)

    def requeue(self, native: str) -> Answer:
        return self.run("scontrol", "requeue", native)

    def alarm(self, native: str) -> Answer:
        """ALRM to the process of the batch script, which is the shim, and to nothing that it started."""
        return self.run("scancel", "--batch", "--signal=ALRM", native)


def read_id(said: str) -> str | None:
    """The id that sbatch printed: the last line that looks like one, for sites print more around it."""
    found = [match[1] for line in said.splitlines() if (match := _ID.fullmatch(line.strip()))]
    return found[-1] if found else None


def is_no_answer(said: str) -> bool:
    """Whether these words mean that the controller was not heard: the job may be there all the same."""
    return any(each in said.lower() for each in _NO_ANSWER)


def wait_for(look: Callable[[], str | None], seconds: float, every: float = 0.004) -> str | None:
    """What `look` finds, as soon as it finds something."""
    until = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None or time.monotonic() >= until:
            return found
        time.sleep(every)
        every = min(1.0, every * 1.5)


def _unavailable(command: str, answer: Answer) -> SlurmUnavailable:
    lines = (answer.err.strip() or answer.out.strip()).splitlines()
    return SlurmUnavailable(
        f"`{command}` does not answer: {lines[-1] if lines else f'exit code {answer.code}'}",
        facts=lines[-4:-1],
        hint="try it by hand on the login node; set `bin` of the target where the command is not on PATH",
    )


def _chunks(values: Sequence[str]) -> list[Sequence[str]]:
    """As many as fit into one word of a command line."""
    return [values[start : start + 2000] for start in range(0, len(values), 2000)]
