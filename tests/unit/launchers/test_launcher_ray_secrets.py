"""Secrets of jobs on Ray: by reference if the record root is a bucket, without Ray."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runtime.config import Project, Settings
from runtime.errors import NotPossible, UnknownName
from runtime.jobs.plan import JobIdentity, LaunchPlan, PlanContext, Target
from runtime.jobs.spec import JobSpec, SecretRef
from runtime.launchers.ray.launcher import RayLauncher
from runtime.launchers.ray.secrets import SecretNotBrought
from tests.jobs_support import open_terminal

RESOURCE = "projects/p/secrets/hf-token"
CONTRACT = {"schema": 1, "stack": "marin", "secrets": {"hf-token": {"env": "HF_TOKEN", "resource": RESOURCE}}}
OF_STACK = SecretRef(name="HF_TOKEN", source="secret-manager://hf-token")
OF_SHELL = SecretRef(name="TOKEN", source="env://T")
OF_FILE = SecretRef(name="KEY", source="file:///key")


def plan(folder: Path, records: str, secrets: Sequence[SecretRef], stack: str | None = "marin") -> LaunchPlan:
    (folder / "contract.json").write_text(json.dumps(CONTRACT))
    settings = Settings(
        project=Project(root=folder),
        data_dir=folder / "d",
        cache_dir=folder / "c",
        config_dir=folder / "f",
        outputs=str(folder / "contract.json") if stack else None,
    )
    environ = {"T": "canary-4711"}
    context = PlanContext(
        settings=settings, now=datetime(2026, 1, 1, tzinfo=UTC), base=folder, environ=environ, records=""
    )
    where = Target(name="tpu", kind="ray", records=records, stack=stack, settings={"address": "http://head:8265"})
    job = JobIdentity(id=f"j-{'0' * 24}", name="train", owner="ada", snapshot=None)
    return RayLauncher().plan(JobSpec(command=("true",), secrets=tuple(secrets)), where, job, context)


def test_order_of_a_bucket_has_the_reference_of_a_secret_of_the_stack_and_no_file(tmp_path: Path) -> None:
    planned = plan(tmp_path, "gs://lab/runs", [OF_STACK])

    assert planned.order["machine_secrets"] == {"HF_TOKEN": RESOURCE}
    assert ("secrets" in planned.order, planned.secrets) == (False, [])
    assert "HF_TOKEN" not in json.dumps(dict(planned.artefacts))


def test_order_of_a_folder_has_files_that_the_launch_writes(tmp_path: Path) -> None:
    planned = plan(tmp_path, "/shared/runs", [OF_STACK, OF_SHELL])

    assert planned.order["secrets"] == {"HF_TOKEN": "secrets/HF_TOKEN", "TOKEN": "secrets/TOKEN"}
    assert "machine_secrets" not in planned.order


@pytest.mark.parametrize("ref", [OF_SHELL, OF_FILE])
def test_secret_that_only_the_launching_machine_can_read_is_refused_with_a_bucket(
    tmp_path: Path, ref: SecretRef
) -> None:
    with pytest.raises(SecretNotBrought) as refused:
        plan(tmp_path, "gs://lab/runs", [OF_STACK, ref])

    assert refused.value.message.startswith(f"secret `{ref.name}` cannot be brought")
    assert f"{ref.name}=secret-manager://NAME" in str(refused.value.hint)
    assert "canary-4711" not in refused.value.render()


def test_secret_that_no_stack_has_is_refused_with_a_bucket(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="hf-tokn"):
        plan(tmp_path, "gs://lab/runs", [SecretRef(name="HF_TOKEN", source="secret-manager://hf-tokn")])
    with pytest.raises(NotPossible, match="no stack is named that has it"):
        plan(tmp_path, "gs://lab/runs", [OF_STACK], stack=None)


def test_dry_run_says_that_the_machine_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "contract.json").write_text(json.dumps(CONTRACT))
    with open_terminal(tmp_path, monkeypatch, capsys) as run:
        monkeypatch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "contract.json"))
        tables = '[tool.runtime.targets.tpu]\nkind = "ray"\naddress = "http://h:8265"\nrecords = "gs://lab/runs"\n'
        Path("pyproject.toml").write_text(f'{tables}stack = "marin"\n')

        words = ("--code", "image", "--secret", "HF_TOKEN=secret-manager://hf-token", "--dry-run", "-o", "json")
        done = run("launch", "--on", "tpu", *words, "--", "true")

    assert done.code == 0, done.err
    said = json.loads(done.out)
    [secret] = (said[0] if isinstance(said, list) else said)["secrets"]
    assert secret == {
        "name": "HF_TOKEN",
        "source": "secret-manager://hf-token",
        "read_by": "machine",
        "how": f"{RESOURCE}, with the machine's own account, at each attempt",
    }
