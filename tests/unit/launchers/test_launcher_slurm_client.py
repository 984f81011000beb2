"""The Slurm launcher when Slurm does not answer, answers late, or kills a request: with stand-in commands.

A real Slurm is in tests/services; here rare behaviour is provoked.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.client.jobs.targets import make_context
from runtime.config import Project, Settings
from runtime.end_reasons import EndReason, Explanation
from runtime.jobs.hosts.base import HostUnavailable
from runtime.jobs.hosts.local import LocalHost
from runtime.jobs.plan import JobIdentity, LaunchPlan, NativeState, Target
from runtime.jobs.spec import Code, CodeMode, JobSpec, JobState
from runtime.launchers.slurm import client as client_module
from runtime.launchers.slurm import launcher as launcher_module
from runtime.launchers.slurm.client import SCRUB, SlurmClient, SlurmUnavailable, clean_variables, read_code
from runtime.launchers.slurm.explain import SubmitRefused
from runtime.launchers.slurm.launcher import SlurmLauncher
from runtime.launchers.slurm.settings import SlurmSettings
from runtime.launchers.slurm.states import OWNED_FORMAT, native_name
from tests.shim_support import signal_all, wait_for

JOB = "j-0123456789abcdef01234567"


class Cluster:
    """A folder of stand-ins for Slurm's commands; each logs its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.target = Target(name="hpc", kind="slurm", records=str(folder / "records"), settings={"bin": str(self.bin)})
        self.host = LocalHost(str(folder / "records"))
        for name in ("squeue", "sacct", "sbatch", "sinfo"):
            self.set(name, "exit 0")

    def set(self, name: str, script: str) -> None:
        path = self.bin / name
        temporary = path.with_suffix(".new")
        temporary.write_text(f'#!/bin/sh\necho "$@" >>{self.folder}/{name}.calls\n{script}\n')
        temporary.chmod(0o755)
        temporary.rename(path)

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def plan(self, **order: Any) -> LaunchPlan:
        loaded = Settings(
            project=Project(root=self.folder), data_dir=self.folder, cache_dir=self.folder, config_dir=self.folder
        )
        spec = JobSpec(command=("true",), code=Code(mode=CodeMode.IMAGE))
        job = JobIdentity(id=JOB, name="x", owner="ada", snapshot=None)
        plan = SlurmLauncher().plan(spec, self.target, job, make_context(loaded, self.folder))
        self.host.files.make_folder(plan.folder)
        return replace(plan, order={**plan.order, **order})

    def submit(self, **order: Any) -> str:
        plan = self.plan(**order)
        return SlurmLauncher().submit(plan, plan.parts[0], self.host)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(launcher_module, "SETTLE_S", 0.3)
    return Cluster(tmp_path)


def submit_impatiently(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write an sbatch that does not answer."""
    with monkeypatch.context() as impatient:
        impatient.setattr(launcher_module, "ANSWER_S", 0.5)
        with pytest.raises(SlurmUnavailable):
            cluster.submit()


def read_pids(cluster: Cluster) -> list[int]:
    """Return the pids that an sbatch writes to the file `pids`, which may take a while."""
    path = cluster.folder / "pids"
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"), "sbatch")
    return [int(word) for word in path.read_text().split()]


def test_submit_called_again_waits_for_the_sbatch_that_runs_and_starts_no_second(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.set("sbatch", f"until [ -e {cluster.folder}/go ]; do sleep 0.05; done; echo 41")
    submit_impatiently(cluster, monkeypatch)
    (cluster.folder / "go").touch()

    assert cluster.submit() == "41"
    assert cluster.submit() == "41"
    assert len(cluster.calls("sbatch")) == 1


def test_submit_called_again_while_sbatch_hangs_gives_up_and_starts_no_second(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.set("sbatch", f"echo $$ >{cluster.folder}/pids; exec sleep 600")
    try:
        submit_impatiently(cluster, monkeypatch)
        read_pids(cluster)
        submit_impatiently(cluster, monkeypatch)
        assert len(cluster.calls("sbatch")) == 1
    finally:
        signal_all(read_pids(cluster))


def test_submit_after_sbatch_and_its_keeper_were_killed_looks_by_name_and_tries_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.set("sbatch", f"echo $$ $PPID >{cluster.folder}/pids; exec sleep 600")
    submit_impatiently(cluster, monkeypatch)
    signal_all(reversed(read_pids(cluster)))
    cluster.set("sbatch", "echo 42")

    assert cluster.submit() == "42"
    assert len(cluster.calls("sbatch")) == 2
    assert cluster.calls("squeue") != []


def test_submit_whose_answer_was_lost_finds_the_job_that_was_made(cluster: Cluster) -> None:
    name = cluster.plan().parts[0].name
    cluster.set("sbatch", "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1")
    cluster.set("squeue", f"[ ! -e {cluster.folder}/sbatch.calls ] || echo '43|N/A|{name}|PENDING||N/A|None'")

    assert cluster.submit() == "43"
    assert len(cluster.calls("sbatch")) == 1


def test_submit_that_was_refused_may_be_tried_again(cluster: Cluster) -> None:
    cluster.set("sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    cluster.set("sinfo", "echo 'main*'; echo long")

    with pytest.raises(SubmitRefused) as refused:
        cluster.submit()
    cluster.set("sbatch", "echo 44")

    assert refused.value.said == "invalid partition specified: x"
    assert refused.value.facts == ("partitions on `hpc`: long, main",)
    assert cluster.submit() == "44"


def test_submit_of_a_later_epoch_is_another_job_of_another_name(cluster: Cluster) -> None:
    cluster.set("sbatch", "echo 45")
    cluster.submit()
    cluster.set("sbatch", "echo 46")

    assert cluster.submit() == "45"
    assert cluster.submit(epoch=2) == "46"
    name = cluster.plan().parts[0].name
    assert [f"--job-name={name}" in call.split() for call in cluster.calls("sbatch")] == [True, False]
    assert f"--job-name={name}.e2" in cluster.calls("sbatch")[1].split()


def test_states_of_any_number_of_jobs_take_one_squeue_and_one_sacct(cluster: Cluster) -> None:
    name = cluster.plan().parts[0].name
    cluster.set("squeue", f"echo '1|N/A|{name}|RUNNING|n1|x|None'; echo '2|N/A|{name}|FAILED|n1|x|NonZeroExitCode'")
    cluster.set("sacct", f"echo '2|{name}|FAILED|3:0|n1|x|None'; echo '3|{name}|TIMEOUT|0:0|n1|x|None'")

    found = SlurmLauncher().states(cluster.target, ["1", "2", "3", "4"], cluster.host)

    assert [(each.native_id, each.state, each.reason, each.exit_code) for each in found] == [
        ("1", JobState.RUNNING, None, None),
        ("2", JobState.FAILED, EndReason.APP_FAILED, 3),
        ("3", JobState.FAILED, EndReason.TIMEOUT, 0),
    ]
    assert (len(cluster.calls("squeue")), len(cluster.calls("sacct"))) == (1, 1)
    assert "--jobs=2,3,4" in cluster.calls("sacct")[0]


def test_states_without_accounting_are_those_of_the_queue(cluster: Cluster) -> None:
    cluster.set("squeue", "echo '1|N/A|x|COMPLETED|n1|x|None'")
    cluster.set("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")

    found = SlurmLauncher().states(cluster.target, ["1", "2"], cluster.host)

    assert [(each.native_id, each.state) for each in found] == [("1", JobState.SUCCEEDED)]


def test_states_while_accounting_is_down_conclude_nothing_about_what_the_queue_lacks(cluster: Cluster) -> None:
    cluster.set("squeue", "echo '1|N/A|x|RUNNING|n1|x|None'")
    cluster.set("sacct", "echo 'sacct: error: Unable to connect to slurmdbd' >&2; exit 1")

    found = SlurmLauncher().states(cluster.target, ["1", "2"], cluster.host)

    assert [(each.native_id, each.state) for each in found] == [("1", JobState.RUNNING), ("2", JobState.UNKNOWN)]


def test_states_while_the_controller_is_down_are_an_infrastructure_failure(cluster: Cluster) -> None:
    cluster.set("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")

    with pytest.raises(SlurmUnavailable) as failed:
        SlurmLauncher().states(cluster.target, ["1"], cluster.host)

    assert failed.value.exit_code == 3


def test_states_are_not_waited_for_for_ever(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LOOK_S", 0.2)
    cluster.set("squeue", "exec sleep 30")

    with pytest.raises(HostUnavailable, match=r"within 0\.2 s and was killed"):
        SlurmLauncher().states(cluster.target, ["1"], cluster.host)


def test_job_of_a_federation_is_looked_for_elsewhere_only_where_this_cluster_gave_it_up(cluster: Cluster) -> None:
    cluster.set(
        "squeue",
        "case \"$*\" in *--local*) echo '1|N/A|x|RUNNING|n1|x|None'; echo '2|N/A|x|REVOKED||x|None' ;;\n"
        "*) echo '2|N/A|x|RUNNING|far1|x|None' ;; esac",
    )

    found = SlurmLauncher().states(cluster.target, ["1", "2"], cluster.host)

    assert [(each.native_id, each.state, each.where) for each in found] == [
        ("1", JobState.RUNNING, "n1"),
        ("2", JobState.RUNNING, "far1"),
    ]
    assert [("--local" in call, call.split()[-1]) for call in cluster.calls("squeue")] == [
        (True, "--jobs=1,2"),
        (False, "--jobs=2"),
    ]


def test_name_is_not_taken_to_be_free_while_accounting_is_down_and_a_try_was_made(cluster: Cluster) -> None:
    name = cluster.plan().parts[0].name
    cluster.set("sacct", "echo 'sacct: error: Unable to connect to slurmdbd' >&2; exit 1")

    assert SlurmLauncher().find(cluster.target, [name], cluster.host) == {}
    cluster.set("sbatch", "echo 47")
    cluster.submit()
    with pytest.raises(SlurmUnavailable):
        SlurmLauncher().find(cluster.target, [name], cluster.host)


def test_oldest_job_of_a_name_that_lives_counts_then_the_oldest_and_a_refused_one_does_not(cluster: Cluster) -> None:
    cluster.set(
        "squeue",
        "echo '7|N/A|a|FAILED||x|BadConstraints'; echo '9|N/A|a|PENDING||x|None'; echo '8|N/A|a|COMPLETED|n1|x|None'; "
        "echo '10|N/A|a|PENDING||x|None'; echo '4|N/A|d|COMPLETED|n1|x|None'; echo '3|N/A|d|COMPLETED|n1|x|None'",
    )
    cluster.set(
        "sacct", "echo '5|b|FAILED|1:0|None assigned|x|None'; echo '6_[0-3]|c|PENDING|0:0|None assigned|x|None'"
    )

    for job in ("a", "b", "c", "d"):
        cluster.host.files.make_folder(f"jobs/{job}/submit/1.0.1")

    found = SlurmLauncher().find(cluster.target, ["a", "b", "c", "d"], cluster.host)

    assert found == {"a": "9", "c": "6", "d": "3"}


def test_slurm_is_not_asked_for_a_name_that_no_sbatch_was_started_for(cluster: Cluster) -> None:
    cluster.set("squeue", "echo '8|N/A|b|PENDING||x|None'")

    assert SlurmLauncher().find(cluster.target, ["b"], cluster.host) == {}
    assert cluster.calls("squeue") == []

    cluster.host.files.make_folder("jobs/b/submit/1.0.1")
    assert SlurmLauncher().find(cluster.target, ["b"], cluster.host) == {"b": "8"}
    assert len(cluster.calls("squeue")) == 1


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUE_HOLD", "SOMETHING_NEW"])
def test_submit_of_a_job_that_the_record_root_forgot_and_slurm_has_is_that_job(cluster: Cluster, state: str) -> None:
    cluster.set("squeue", f"echo '48|{state}'")
    cluster.set("sbatch", "echo 49")

    assert cluster.submit() == "48"
    assert cluster.submit() == "48"

    name = cluster.plan().parts[0].name
    assert cluster.calls("sbatch") == []
    assert cluster.calls("squeue") == [f"-h --local -t all -o %F|%T -u {os.getuid()} --name={name}"]


def test_submit_of_a_job_that_has_ended_and_was_forgotten_is_a_new_one(cluster: Cluster) -> None:
    cluster.set("squeue", "echo '48|COMPLETED'; echo '49|CANCELLED'; echo '50|OUT_OF_MEMORY'")
    cluster.set("sbatch", "echo 51")

    assert cluster.submit() == "51"


@pytest.mark.parametrize(
    "said", ["slurm_load_jobs error: Unable to contact slurm controller", "squeue: error: some other trouble"]
)
def test_submit_while_slurm_does_not_say_what_it_has_submits_nothing(cluster: Cluster, said: str) -> None:
    cluster.set("squeue", f"echo '{said}' >&2; exit 1")
    cluster.set("sbatch", "echo 52")

    with pytest.raises(SlurmUnavailable) as silent:
        cluster.submit()
    cluster.set("squeue", "exit 0")

    assert silent.value.message == f"`squeue` does not answer: {said}"
    assert cluster.calls("sbatch") == []
    assert cluster.submit() == "52"


def clean_by_shell(given: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(["sh", "-c", SCRUB + "env"], env=given, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def clean_here(given: dict[str, str]) -> dict[str, str]:
    changed = given | clean_variables(given, SlurmSettings())
    return {name: value for name, value in changed.items() if value is not None}


@pytest.mark.parametrize("clean", [clean_by_shell, clean_here])
def test_commands_see_no_options_of_the_shell_but_where_slurm_is(
    clean: Callable[[dict[str, str]], dict[str, str]],
) -> None:
    kinds = ("SLURM", "SBATCH", "SALLOC", "SQUEUE", "SACCT", "SCANCEL", "SCONTROL", "SINFO")
    kept = {"SLURM_CONF": "/c", "SLURM_CONF_SERVER": "s", "SLURM_JWT": "t", "MINE": "1", "SLURMY": "1"}
    found = clean({"PATH": os.environ["PATH"], **{f"{kind}_X1": "x" for kind in kinds}, **kept})

    assert {name: value for name, value in found.items() if name not in ("PATH", "PWD", "SHLVL", "_")} == {
        **kept,
        "LC_ALL": "C",
        "SLURM_TIME_FORMAT": "standard",
    }


def test_command_runs_with_the_configuration_and_the_folder_that_the_target_names(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "x")
    cluster.set("sinfo", 'echo "$SLURM_CONF $SBATCH_PARTITION"; command -v squeue')
    settings = SlurmSettings(bin=str(cluster.bin), slurm_conf="/etc/lab.conf")

    answer = SlurmClient(cluster.host, settings).run("sinfo")

    assert answer.out.splitlines() == ["/etc/lab.conf ", f"{cluster.bin}/squeue"]


def test_sbatch_of_an_attempt_that_was_started_already_is_not_run_again(cluster: Cluster) -> None:
    cluster.set("sbatch", "echo 47")
    client = SlurmClient(cluster.host, SlurmSettings(bin=str(cluster.bin)))
    folder = Path(cluster.host.files.root)
    folder.mkdir()

    for _ in range(2):
        pid = client.start_sbatch(["sbatch"], "a", str(folder / "submit/1.0.1"), str(folder))
        assert client.await_sbatch(pid, 60) is True

    assert len(cluster.calls("sbatch")) == 1
    found = {each.name: each.read_text() for each in (folder / "submit/1.0.1").iterdir()}
    assert found.pop("who").split()[1:] == [socket.gethostname()]
    assert found == {"out": "47\n", "err": "", "code": "0\n", "log": ""}


@pytest.mark.parametrize(
    ("content", "code"), [(None, None), (b"", None), (b"1", None), (b"0\n", "0"), (b"127\n", "127")]
)
def test_exit_code_counts_once_it_is_there_whole(content: bytes | None, code: str | None) -> None:
    assert read_code(content) == code


def test_wait_returns_what_is_found_and_none_after_its_time() -> None:
    answers = iter([None, None, "here"])

    assert client_module.wait_for(lambda: next(answers), 60) == "here"
    assert client_module.wait_for(lambda: None, 0.1) is None


# Captured from Slurm 22.05: `scontrol -o show job` of a waiting job, cut to the fields we read, and `sacctmgr` output.
WAITS = (
    "JobId=9 JobName=wrap UserId=root(0) GroupId=root(0) Account=root QOS=high JobState=PENDING Reason={reason} "
    "Dependency=(null) TimeLimit=00:10:00 TimeMin=N/A StartTime=Unknown Partition=debug NumNodes=1 NumCPUs=4 "
    "TRES=cpu=4,mem=800M,node=1,billing=4 Socks/Node=* Power= "
)


def explain_waiting(cluster: Cluster, reason: str, limits: str) -> Explanation:
    job, partition = WAITS.format(reason=reason), "PartitionName=debug QoS=N/A MaxTime=1:00:00"
    cluster.set("scontrol", f'case "$*" in *partition*) echo "{partition}" ;; *) echo "{job}" ;; esac')
    cluster.set("sacctmgr", f"echo '{limits}'" if limits else "exit 1")
    waits = NativeState(native_id="9", index=None, state=JobState.PENDING, raw=f"PENDING/{reason}")
    found = SlurmLauncher().explain(cluster.target, waits, cluster.host)
    assert found is not None
    return found


def test_limits_that_a_job_exceeds_by_itself_are_never_met(cluster: Cluster) -> None:
    found = explain_waiting(cluster, "QOSMaxWallDurationPerJobLimit", "cpu=2||cpu=3,gres/gpu=1||cpu=6|00:05:00")

    assert found.sentence == "it will never start: QOS `high` allows cpu=2 for a job, and it asks for cpu=4"
    assert found.hint == "cancel it and ask for less, or use another QOS: `qos` of the target"
    assert found.evidence[-2:] == (
        "QOS `high` allows cpu=3 for all jobs of a user, and it asks for cpu=4",
        "QOS `high` allows a job 5m, and its time limit is 10m",
    )


def test_limits_that_others_have_used_up_are_waited_for(cluster: Cluster) -> None:
    found = explain_waiting(cluster, "QOSGrpCpuLimit", "||||cpu=6|")

    assert found.sentence == "all jobs of its QOS together have reached its limit"
    assert found.evidence[-1] == "QOS `high` allows cpu=6 for all its jobs together"


def test_limits_of_an_account_are_those_of_the_user_and_of_all(cluster: Cluster) -> None:
    found = explain_waiting(cluster, "AssocMaxCpuPerJobLimit", "|cpu=8|||\nbob|cpu=1|||\nroot|cpu=2|||")

    assert (
        found.sentence == "it will never start: account `root` of `root` allows cpu=2 for a job, and it asks for cpu=4"
    )


def test_limits_that_nobody_tells_change_nothing(cluster: Cluster) -> None:
    assert explain_waiting(cluster, "QOSMaxCpuPerUserLimit", "").sentence == "a limit of its QOS is reached"


# what is ours

STRAY = "j-89abcdef0123456789abcdef"


def test_owned_jobs_are_asked_for_by_user_and_removed_by_scancel(cluster: Cluster) -> None:
    name = native_name(STRAY, cluster.host.files.root, 0, None)
    cluster.set(
        "squeue", f'[ -e {cluster.folder}/gone ] || echo "7|RUNNING|$SLURM_TIME_FORMAT|u1|{name}|research-runtime/ada"'
    )
    cluster.set("scancel", f"touch {cluster.folder}/gone")
    launcher = SlurmLauncher()

    assert launcher.owned(cluster.target, cluster.host, owner="ada") == [], "a time that cannot be read is no age"
    row = f"7|RUNNING|1769860800|u1|{name}|research-runtime/ada"
    cluster.set("squeue", f'[ -e {cluster.folder}/gone ] || echo "{row}"')
    (owned,) = launcher.owned(cluster.target, cluster.host, owner="ada")
    everybody = launcher.owned(cluster.target, cluster.host)
    left = launcher.remove(cluster.target, [owned], cluster.host)

    assert (owned.job, owned.native_id, everybody, left) == (STRAY, "7", [owned], [])
    assert cluster.calls("squeue")[1:3] == [
        f"-u {os.getuid()} -h --local -t all -o {OWNED_FORMAT}",
        f"-h --local -t all -o {OWNED_FORMAT}",
    ]
    assert cluster.calls("scancel") == ["7"]
    assert launcher.owned(cluster.target, cluster.host) == []


def test_owned_jobs_of_a_slurm_that_does_not_answer_are_not_none(cluster: Cluster) -> None:
    cluster.set("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")

    with pytest.raises(SlurmUnavailable):
        SlurmLauncher().owned(cluster.target, cluster.host)


def test_submission_carries_the_owner_in_its_comment(cluster: Cluster) -> None:
    (part,) = cluster.plan().parts

    assert "--comment=research-runtime/ada" in part.native["words"]
