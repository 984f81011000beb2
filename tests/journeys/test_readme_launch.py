"""The README's launch example: the same command here, over ssh, on Slurm, Kubernetes and Ray, with only `--on` changed.

`tests/services`, which has a running Slurm, Kubernetes and Ray head, follows it there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.readme_support import AS_PROMISED, first_commands, follow_readme, read_blocks, run_in, split_commands
from tests.ssh_support import SshServer


def test_readme_launches_differ_in_their_target_alone() -> None:
    launches, others = split_commands(read_blocks()["commands"])

    assert list(launches) == ["local", "box", "hpc", "lab", "tpu"]
    assert {tuple(word for word in words if word != on) for on, words in launches.items()} == {
        ("runtime", "launch", "--on", "-f", "job.yaml")
    }
    assert [words[1] for words in others] == ["status", "logs", "explain", "fetch"]


def test_readme_targets_and_job_are_accepted_as_they_stand(tmp_path: Path) -> None:
    blocks = read_blocks()
    run_in(["runtime", "init", str(tmp_path)], tmp_path)
    (tmp_path / "runtime.toml").write_text(blocks["toml"])

    said = run_in(["runtime", "launch", "--on", "local,box,hpc,lab", "-f", "job.yaml", "--dry-run"], tmp_path)

    assert [line.partition("`fit` on ")[2] for line in said.splitlines() if line.startswith("# job ")] == [
        "local (local)",
        "box (ssh)",
        "hpc (slurm)",
        "lab (kubernetes)",
    ]


@pytest.mark.slow
def test_readme_first_commands_work_as_written_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    script = "set -e\n" + "".join(f"echo '$ {line}'\n{line}\n" for line in first_commands())

    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )

    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr.lower().replace('"severity": "error"', ""), done.stderr
    said = done.stdout.partition("$ runtime results last\n")[2].partition("$ ")[0].splitlines()
    assert [line.split("\t")[2:4] for line in said] == [[f"train fit --seed={seed}", "succeeded"] for seed in range(10)]
    assert all('"intercept": ' in line for line in said)


@pytest.mark.slow
def test_readme_launch_on_this_machine_ends_as_promised(tmp_path: Path) -> None:
    assert follow_readme(tmp_path / "project", "local") == AS_PROMISED


@pytest.mark.slow
def test_readme_launch_over_ssh_ends_as_promised(ssh_server: SshServer, tmp_path: Path) -> None:
    box = {
        "kind": "ssh",
        "host": ssh_server.host,
        "options": ssh_server.options,
        "records": str(tmp_path / "records"),
    }

    assert follow_readme(tmp_path / "project", "box", settings=box) == AS_PROMISED
