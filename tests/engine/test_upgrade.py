"""States from earlier releases under this release: protected resources are neither replaced nor lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engine.harness import PACK, Lab, Step
from tests.engine.record_baseline import FOLDER, as_text, portable

BASELINES = sorted(FOLDER.glob("*.json"))
HARMLESS = ("create", "update", "import")


@pytest.mark.parametrize("path", BASELINES, ids=lambda path: path.stem)
def test_state_of_an_earlier_release_upgrades_without_replacing_what_is_protected(lab: Lab, path: Path) -> None:
    stack = path.stem.rpartition("-")[0]
    protected = [each["urn"] for each in states(path) if each.get("protect")]
    lab.init(stack)
    lab.run("stack", "import", "--stack", stack, "--file", str(path))

    steps = lab.preview(stack, *PACK)

    assert len(protected) > 3
    assert touched(steps, protected) == []


def test_baseline_with_another_name_would_be_noticed(lab: Lab, tmp_path: Path) -> None:
    [path] = [path for path in BASELINES if path.stem.startswith("skylight")]
    changed = tmp_path / "changed.json"
    changed.write_text(path.read_text().replace("skylight-default-dead", "skylight-default-lost"))
    lab.init("skylight")
    lab.run("stack", "import", "--stack", "skylight", "--file", str(changed))

    said = lab.run("preview", "--json", "--stack", "skylight", check=False)

    protected = [each["urn"] for each in states(path) if each.get("protect")]
    replaced = [urn.rpartition("::")[2] for _, urn in touched(lab.steps(said), protected)]
    # The engine stops at the first protected resource that it would replace.
    assert replaced
    assert set(replaced) <= {"default-queue-dead-topic", "default-queue-dead-subscription"}
    assert "marked for protection" in said.text


def test_baselines_hold_nothing_of_a_machine_and_no_secret() -> None:
    assert BASELINES
    for path in BASELINES:
        text = path.read_text()
        assert [word for word in ("ciphertext", "secrets_providers", "file://", "sourcePosition") if word in text] == []


def test_portable_state_keeps_what_is_protected_and_drops_secrets_and_grants() -> None:
    secret = {"4dabf18193072939515e22adb298388d": "1b47061264138c4ac30d75fd1eb44270", "ciphertext": "x"}
    topic = {"urn": "t", "type": "gcp:pubsub/topic:Topic", "protect": True, "outputs": {"a": "b", "labels": secret}}
    grant = {"urn": "g", "type": "gcp:pubsub/topicIAMMember:TopicIAMMember", "dependencies": ["t"]}
    deployment = {"manifest": {"time": "now"}, "secrets_providers": {"state": "salt"}, "resources": [topic, grant]}

    kept = portable({"version": 3, "deployment": deployment})

    assert kept["deployment"]["resources"] == [{**topic, "outputs": {"a": "b"}}]
    assert "secrets_providers" not in kept["deployment"]
    assert json.loads(as_text(kept)) == kept


def states(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text())["deployment"]["resources"]
    return found


def touched(steps: Sequence[Step], protected: Sequence[str]) -> list[tuple[str, str]]:
    return [(step.op, step.urn) for step in steps if step.urn in protected and step.op not in HARMLESS]
