"""What `runtime convert marin` makes, judged by the rules of a stack and built as one."""

from __future__ import annotations

import pytest
import yaml

from infra.settings.model import NAMESPACE, StackSettings
from infra.settings.read import parse_settings
from runtime.clusters.convert.cluster import convert_cluster, render
from runtime.jobs.spec_file import load_yaml
from tests.cluster_files import LAB, SMALL
from tests.infra.test_components_together import record_stack


def settings_of(text: str) -> StackSettings:
    config = yaml.safe_load(render(convert_cluster(load_yaml(text))))["config"]
    prefix = f"{NAMESPACE}:"
    return parse_settings("lab", {key.removeprefix(prefix): each for key, each in config.items() if prefix in key})


@pytest.mark.parametrize(
    "text", [LAB, SMALL, LAB.replace("  image:", "  head_image:")], ids=["lab", "small", "no-image"]
)
def test_converted_file_is_a_stack_that_keeps_every_rule(text: str) -> None:
    recording = record_stack(settings_of(text))

    (contract,) = recording.outputs.values()
    assert set(contract["clusters"]) == {"main"}
    assert contract["records"]["url"].startswith("gs://lab-1234-lab")


def test_buckets_that_variables_name_are_granted_to_heads_and_nodes() -> None:
    recording = record_stack(settings_of(LAB))

    grants = recording.of_type("gcp:storage/bucketIAMMember:BucketIAMMember")
    granted = {(each.name, each.inputs["bucket"]) for each in grants if not each.name.startswith("records")}
    assert granted == {(f"lab-us-central2-bucket-main-{role}-writer", "lab-us-central2") for role in ("head", "node")}


def test_converted_secrets_are_read_by_the_cluster_and_made_by_nobody() -> None:
    recording = record_stack(settings_of(LAB))

    assert recording.of_type("gcp:secretmanager/secret:Secret") == []
    grants = {each.name for each in recording.resources if each.name.startswith("main-head-node-reads-")}
    assert grants == {"main-head-node-reads-hf-token", "main-head-node-reads-openai-key"}
