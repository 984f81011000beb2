"""The commands of Slurm that a launcher runs on its host, one method each."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from runtime.errors import InfrastructureFailure
from runtime.jobs.hosts.base import CommandResult, Host
from runtime.jobs.hosts.local import LocalHost
from runtime.jobs.plan import NativeStart
from runtime.launchers.slurm import states
from runtime.launchers.slurm.explain import OF_ACCOUNT, OF_QOS, WALL, Limit, read_limits
from runtime.launchers.slurm.settings import SlurmSettings

# Variables of these kinds change the commands' behaviour, and SBATCH_* beat even options in the script. Variables that
# locate Slurm stay.
SCRUB: Final = (
    "for name in $(env | sed -n 's/^\\(\\(SLURM\\|SBATCH\\|SALLOC\\|SQUEUE\\|SACCT\\|SCANCEL\\|SCONTROL\\|SINFO\\)_[A-Za-z0-9_]*\\)=.*/\\1/p'); do\n"
    "  case $name in SLURM_CONF|SLURM_CONF_SERVER|SLURM_JWT) ;; *) unset $name ;; esac\n"
    "done\n"
    "export LC_ALL=C SLURM_TIME_FORMAT=standard\n"
)
# The try is on disk before sbatch runs, and sbatch's answer is on disk even if nobody waits for it. squeue looks for a job
# of the same name that has not ended, which the record root may have lost. Each word that is not a builtin of the shell is
# one more process between a launch and its answer.
NOT_ASKED: Final = "not asked"
"""In place of sbatch's exit code: `squeue` did not answer, so sbatch was not run."""
SUBMIT: Final = (
    "try=$1 name=$2 user=$3; shift 3\n"
    "read -r where 2>/dev/null </proc/sys/kernel/hostname || where=$(hostname)\n"
    "set -C\n"
    '{ echo "$$ $where" >"$try/who"; } 2>/dev/null || exit 0\n'
    # The controller picks out the jobs of one user; squeue itself looks through their names.
    'rows=$(squeue -h --local -t all -o "%F|%T" -u "${user:-$(id -u)}" --name="$name" 2>"$try/err" </dev/null) ||\n'
    f'  {{ echo {NOT_ASKED} >"$try/code"; exit 0; }}\n'
    "for row in $rows; do\n"
    f"  case ${{row#*|}} in {'|'.join(states.ENDED)}) ;; *)\n"
    '    echo "${row%%|*}" >"$try/out"; echo 0 >"$try/code"; exit 0 ;;\n'
    "  esac\n"
    "done\n"
    '"$@" >"$try/out" 2>>"$try/err" </dev/null\n'
    'echo $? >"$try/code"\n'
)
_ALIVE: Final = (
    'read pid where <"$1/who" || exit 3\n[ "$where" = "$(hostname)" ] || exit 2\n'
    'case "$(ps -o stat= -p "$pid" 2>/dev/null)" in ""|Z*) exit 1 ;; esac\n'
)
_KINDS: Final = ("SLURM_", "SBATCH_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_")
_KEPT: Final = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_TURN_S: Final = 1.0
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
"""How long squeue may take. Slurm gives up after some ten seconds if a controller is down, but only after minutes if its
host is silent."""
HISTORY: Final = "now-30days"
"""How far back accounting is asked for a name; a launch that lost its answer is tried again sooner."""


class SlurmUnavailable(InfrastructureFailure):
    """Slurm does not answer: nothing is known about any job."""


class SlurmClient:
    def __init__(self, host: Host, settings: SlurmSettings) -> None:
        self._host, self._settings = host, settings

    def run(self, *words: str, timeout_s: float = 60) -> CommandResult:
        """A command with a clean environment."""
        cleaned, env = self._clean(words)
        return self._host.run(cleaned, timeout_s=timeout_s, env=env)

    def _clean(self, words: Sequence[str], script: str = "") -> tuple[list[str], dict[str, str | None]]:
        """Words and variables that run the command, or a script that gets the words, in a clean environment.

        On another machine a shell finds the variables to clean.
        """
        if isinstance(self._host, LocalHost):
            env = clean_variables(os.environ, self._settings)
            return (["sh", "-c", script, "slurm", *words] if script else list(words)), env
        lines = SCRUB
        if self._settings.bin:
            lines += f"PATH={shlex.quote(self._settings.bin)}:$PATH\n"
        if self._settings.slurm_conf:
            lines += f"export SLURM_CONF={shlex.quote(self._settings.slurm_conf)}\n"
        return ["sh", "-c", lines + (script or 'exec "$@"\n'), "slurm", *words], {}

    # looking

    def queue(self, ids: Sequence[str]) -> list[states.SlurmRow]:
        """The queue's rows of these jobs, tasks of arrays one by one."""
        rows = self._queue("--jobs", ids, "--local")
        # Another cluster of the federation may have a revoked job. It is asked only then, since each question to a
        # controller that is down takes its time.
        elsewhere = sorted({row.job for row in rows if row.state == "REVOKED"})
        found = self._queue("--jobs", elsewhere) if elsewhere else []
        return [*(row for row in rows if row.job not in {each.job for each in found}), *found]

    def queue_named(self, names: Sequence[str]) -> list[states.SlurmRow]:
        return self._queue("--name", names, "--local")

    def queue_owned(self, *, everybody: bool) -> str:
        """The queue's lines in `OWNED_FORMAT` of the user who runs the commands, or of all users."""
        whose = "" if everybody else '-u "$(id -u)" '
        script = f'exec env SLURM_TIME_FORMAT=%s squeue {whose}"$@"'
        words = ("-h", "--local", "-t", "all", "-o", states.OWNED_FORMAT)
        answer = self.run("sh", "-c", script, "squeue", *words, timeout_s=LOOK_S)
        if answer.code != 0:
            raise _unavailable("squeue", answer)
        return answer.out

    def _queue(self, option: str, values: Sequence[str], *more: str) -> list[states.SlurmRow]:
        rows: list[states.SlurmRow] = []
        for some in _chunks(values):
            words = ("-h", "-r", "-t", "all", "-o", states.SQUEUE_FORMAT, *more, f"{option}={','.join(some)}")
            answer = self.run("squeue", *words, timeout_s=LOOK_S)
            if answer.code != 0 and _NOT_FOUND not in answer.err:
                raise _unavailable("squeue", answer)
            rows += states.parse_squeue(answer.out)
        return rows

    def accounting(self, ids: Sequence[str]) -> list[states.SlurmRow] | None:
        """Accounting's rows of these jobs; None if the cluster keeps no accounting. Raises `SlurmUnavailable`."""
        return self._accounting("--jobs", ids)

    def accounting_named(self, names: Sequence[str]) -> list[states.SlurmRow] | None:
        return self._accounting("--name", names, "-S", HISTORY)

    def _accounting(self, option: str, values: Sequence[str], *more: str) -> list[states.SlurmRow] | None:
        rows: list[states.SlurmRow] = []
        for some in _chunks(values):
            text = self._sacct(f"--format={states.SACCT_FORMAT}", *more, f"{option}={','.join(some)}")
            if text is None:
                return None
            rows += states.parse_sacct(text)
        return rows

    def list_starts(self, ids: Sequence[str]) -> list[NativeStart]:
        """Every start of these jobs or members of arrays that accounting remembers. Raises `SlurmUnavailable`."""
        words = ("--duplicates", f"--format={states.STARTS_FORMAT}", f"--jobs={','.join(ids)}")
        return states.parse_starts(self._sacct(*words, time_format="%s") or "")

    def _sacct(self, *words: str, time_format: str = "standard") -> str | None:
        answer = self.run("env", f"SLURM_TIME_FORMAT={time_format}", "sacct", "-X", "-n", "-P", *words)
        said = answer.err.lower()
        if answer.code == 127 or any(each in said for each in _NO_ACCOUNTING):
            return None
        if answer.code != 0 or "error" in said:
            raise _unavailable("sacct", answer)
        return answer.out

    def partitions(self) -> list[str]:
        """Names of the partitions; empty if Slurm does not list them."""
        return sorted({line.strip().rstrip("*") for line in self.run("sinfo", "-h", "-o", "%P").out.splitlines()})

    def names_of(self, kind: str) -> list[str]:
        """Names of accounts or QOS (`account`, `qos`) that this user may name; empty if Slurm does not list them."""
        answer = self.run("sh", "-c", f'sacctmgr -n -P show assoc user="$(id -un)" format={kind}')
        names = {name for line in answer.out.splitlines() for name in line.strip().split(",") if name}
        return sorted(names) if answer.code == 0 else []

    def limits_of_qos(self, name: str) -> list[Limit]:
        """The limits of a QOS; empty if Slurm does not list them."""
        words = ("show", "qos", "where", f"name={name}", f"format={','.join(OF_QOS)},{WALL}")
        return read_limits(self._sacctmgr(*words), OF_QOS, f"QOS `{name}`")

    def limits_of_account(self, name: str, user: str) -> list[Limit]:
        """The limits of an account, and of this user of it; empty if Slurm does not list them."""
        shown = ",".join(("User", *OF_ACCOUNT, WALL))
        found = []
        for line in self._sacctmgr("show", "assoc", "where", f"account={name}", f"format={shown}").splitlines():
            who, _, rest = line.partition("|")
            if who in ("", user):
                whose = f"account `{name}`" + (f" of `{who}`" if who else "")
                found += read_limits(rest, OF_ACCOUNT, whose)
        return found

    def _sacctmgr(self, *words: str) -> str:
        answer = self.run("sacctmgr", "-n", "-P", *words)
        return answer.out if answer.code == 0 else ""

    def qos_of_partition(self, name: str) -> str | None:
        match = re.search(r"\bQoS=(\S+)", self.run("scontrol", "-o", "show", "partition", name).out)
        return match[1] if match and match[1] != "N/A" else None

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
        """A line for each sort of node: partition, state, CPUs, MB, GPUs, features, number."""
        return self.run("sinfo", "-h", "-e", "-o", "%P|%T|%c|%m|%G|%f|%D").out

    # submitting

    def start_sbatch(self, words: Sequence[str], name: str, attempt: str, folder: str) -> int:
        """Run sbatch in a process that outlives us, unless a job of this `name` has not ended; returns the pid.

        sbatch's answer, or that job's id, is left in the folder `attempt`. Only the first call for an attempt runs it.
        """
        user = str(os.getuid()) if isinstance(self._host, LocalHost) else ""
        script, env = self._clean([attempt, name, user, *words], SUBMIT)
        return self._host.spawn(script, folder=folder, log=f"{attempt}/log", env=env)

    def await_sbatch(self, pid: int, seconds: float) -> bool:
        """Whether the process that `start_sbatch` started ends within `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._host.wait(pid, min(left, _TURN_S)):
                return True
        return False

    def sbatch_lives(self, attempt: str) -> bool | None:
        """Whether the process of this attempt still runs; None if it cannot be seen from here."""
        code = self._host.run(["sh", "-c", _ALIVE, "alive", attempt]).code
        return None if code == 2 else code == 0

    # acting

    def cancel(self, ids: Sequence[str]) -> CommandResult:
        return self.run("scancel", *ids)

    def requeue(self, native: str) -> CommandResult:
        return self.run("scontrol", "requeue", native)

    def alarm(self, native: str) -> CommandResult:
        """ALRM to the process of the batch script, which is the shim, and to nothing that it started."""
        return self.run("scancel", "--batch", "--signal=ALRM", native)


def clean_variables(environ: Mapping[str, str], settings: SlurmSettings) -> dict[str, str | None]:
    """The changes to an environment before a command of Slurm runs in it; None removes a variable."""
    changes: dict[str, str | None] = {name: None for name in environ if name.startswith(_KINDS) and name not in _KEPT}
    changes |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    if settings.bin:
        changes["PATH"] = f"{settings.bin}:{environ.get('PATH', os.defpath)}"
    if settings.slurm_conf:
        changes["SLURM_CONF"] = settings.slurm_conf
    return changes


def read_code(content: bytes | None) -> str | None:
    """The exit code that the script around sbatch left; None until the file is whole."""
    return content.decode().strip() if content and content.endswith(b"\n") else None


def read_id(said: str) -> str | None:
    """The id that sbatch printed: the last line that looks like one, for sites print more around it."""
    found = [match[1] for line in said.splitlines() if (match := _ID.fullmatch(line.strip()))]
    return found[-1] if found else None


def is_no_answer(said: str) -> bool:
    """Whether these words mean that the controller did not answer: the job may exist all the same."""
    return any(each in said.lower() for each in _NO_ANSWER)


def wait_for(look: Callable[[], str | None], seconds: float, every: float = 0.004) -> str | None:
    """Call `look` until it finds something, for at most `seconds`; returns its last answer."""
    until = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None or time.monotonic() >= until:
            return found
        time.sleep(every)
        every = min(1.0, every * 1.5)


def _unavailable(command: str, answer: CommandResult) -> SlurmUnavailable:
    lines = (answer.err.strip() or answer.out.strip()).splitlines()
    return SlurmUnavailable(
        f"`{command}` does not answer: {lines[-1] if lines else f'exit code {answer.code}'}",
        facts=lines[-4:-1],
        hint="try it by hand on the login node; set `bin` of the target where the command is not on PATH",
    )


def _chunks(values: Sequence[str]) -> list[Sequence[str]]:
    """As many as fit into one word of a command line."""
    return [values[start : start + 2000] for start in range(0, len(values), 2000)]
