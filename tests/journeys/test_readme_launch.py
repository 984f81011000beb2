"""The README's launch example: the same command here, over ssh, on Slurm, Kubernetes and Ray, with only `--on` changed.

`tests/services`, which has a running Slurm, Kubernetes and Ray head, follows it there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.readme_support import AS_PROMISED, follow_readme, read_blocks, run_in, split_commands
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
def test_readme_launch_over_ssh_ends_as_promised(ssh_server: SshServer, tmp_path: Path) -> None:
    box = {
        "kind": "ssh",
        "host": ssh_server.host,
        "options": ssh_server.options,
        "records": str(tmp_path / "records"),
    }

    assert follow_readme(tmp_path / "project", "box", settings=box) == AS_PROMISED
