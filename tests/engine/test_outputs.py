"""`runtime stack` on the engine's own state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.harness import PROJECT, Lab, Said


def test_stack_list_names_the_engines_stacks(dev: Lab) -> None:
    listed = dev.runtime("stack", "list", "-o", "json").json()

    assert {each["name"]: each["source"] for each in listed}.get("dev") == "pulumi"


def test_stack_pull_reads_the_contract_and_keeps_it(dev: Lab) -> None:
    pulled = dev.runtime("stack", "pull", "--stack", "dev", "-o", "json").json()
    shown = dev.runtime("stack", "show", "dev", "-o", "json").json()

    assert (pulled["name"], pulled["source"]) == ("dev", "pulumi")
    assert shown["queues"] == dev.contract("dev")["queues"]
    assert shown["records"] == {"location": "us-central1", "url": "gs://my-lab-dev-dev-records"}


def test_stack_pull_needs_no_passphrase(dev: Lab) -> None:
    pulled = dev.runtime("stack", "pull", "dev", "-o", "json", PULUMI_CONFIG_PASSPHRASE=None)

    assert pulled.json()["source"] == "pulumi"


def test_stack_pull_from_another_folder_needs_the_full_name(dev: Lab, tmp_path: Path) -> None:
    bare = dev.runtime("stack", "pull", "dev", cwd=tmp_path, check=False, XDG_CACHE_HOME=str(tmp_path / "cache"))
    full = dev.runtime("stack", "pull", f"organization/{PROJECT}/dev", "-o", "json", cwd=tmp_path)

    assert bare.code == 2
    assert "ORGANISATION/PROJECT/STACK" in bare.err
    assert full.json()["name"] == "dev"


def test_stack_pull_of_a_stack_that_is_not_there_names_those_that_are(dev: Lab) -> None:
    said = dev.runtime("stack", "pull", "dve", check=False)

    assert said.code == 2
    assert "did you mean `dev`?" in said.err


def test_stack_pull_of_a_stack_that_was_never_up_says_to_run_it(lab: Lab) -> None:
    lab.init("dev")

    said = lab.runtime("stack", "pull", "dev", check=False)

    assert said.code == 2
    assert "pulumi up --stack dev" in said.err


def test_secret_value_in_a_contract_is_an_error(lab: Lab) -> None:
    (lab.project / "infra").unlink()
    (lab.project / "infra").mkdir()
    (lab.project / "infra" / "__main__.py").write_text(
        "import pulumi\n"
        "pulumi.export('contract', {'schema': 1, 'stack': 'leaky', 'secrets': {'t': {'resource': pulumi.Output.secret('x'),"
        " 'env': 'T'}}})\n"
    )
    lab.run("stack", "init", "leaky", "--no-select")
    lab.up("leaky")

    said: Said = lab.runtime("stack", "pull", "leaky", check=False)

    assert said.code != 0
    assert "secret" in said.err
    assert "secrets.t.resource" in said.err


@pytest.mark.parametrize("stack", ["dev"])
def test_published_copy_stands_in_where_the_engine_cannot_answer(dev: Lab, tmp_path: Path, stack: str) -> None:
    copy = tmp_path / "v1.json"
    copy.write_text(json.dumps(dev.contract(stack)))

    gone = {"PULUMI_BACKEND_URL": f"file://{tmp_path}/gone", "RUNTIME_OUTPUTS": str(copy)}
    said = dev.runtime("stack", "pull", stack, "-o", "json", **gone)

    assert said.json()["source"] == str(copy)
    assert "unable to open state directory" in said.err
