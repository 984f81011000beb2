"""The checked-in stack files: their content, their documentation, and forbidden content."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.check.recording import Recording, record
from infra.policy.base import PROJECT_GRANT
from infra.policy.grants import PROJECT_ROLES
from infra.policy.rules import apply_rules, bounds_of
from infra.program import build
from infra.render.cluster import cpus_per_host
from infra.settings import model as config
from infra.settings.model import StackSettings
from infra.settings.read import InvalidSettings, settings_from

ROOT = Path(__file__).parents[2]
STACKS = sorted(path.name.split(".")[1] for path in ROOT.glob("Pulumi.*.yaml"))
MARIN = ("marin-us-central2", "marin-us-west4", "marin-eu-west4")


def load(stack: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / f"Pulumi.{stack}.yaml").read_text())
    return loaded


def settings_of(stack: str) -> StackSettings:
    return settings_from(stack, load(stack)["config"])


def recording_of(stack: str) -> Recording:
    def program() -> None:
        build(settings_of(stack))

    return record(program, stack=stack)


def find_missing_header(text: str) -> list[str]:
    """List the parts that a stack file's header comment lacks."""
    header = "\n".join(line for line in text.partition("config:")[0].splitlines() if line.startswith("#"))
    wanted = {"what it is for": len(header) > 80, "what to change first": "Change first:" in header}
    return [what for what, there in wanted.items() if not there]


def test_the_stacks_are_those_that_the_documentation_names() -> None:
    assert STACKS == [
        "dev",
        "marin-eu-west4",
        "marin-pipeline",
        "marin-us-central2",
        "marin-us-west4",
        "phoebe",
        "skylight",
    ]


@pytest.mark.parametrize("stack", STACKS)
def test_stack_file_can_be_used(stack: str) -> None:
    assert settings_of(stack).stack == stack


@pytest.mark.parametrize("stack", STACKS)
def test_stack_file_opens_with_what_it_is_for_and_what_to_change_first(stack: str) -> None:
    assert find_missing_header((ROOT / f"Pulumi.{stack}.yaml").read_text()) == []


def test_stack_file_without_a_header_is_noticed() -> None:
    assert find_missing_header("# dev\nconfig: {}") == ["what it is for", "what to change first"]


def find_secrets(text: str) -> list[str]:
    """List secrets in a stack file other than the key of a bootstrapped stack."""
    loaded = yaml.safe_load(text)
    found = [key for key in loaded if key not in ("config", "secretsprovider", "encryptedkey")]
    if not str(loaded.get("secretsprovider", "gcpkms://")).startswith("gcpkms://"):
        found.append("secretsprovider")
    return found + re.findall(r"secure:", text)


@pytest.mark.parametrize("stack", STACKS)
def test_stack_file_has_no_secret_and_no_passphrase(stack: str) -> None:
    assert find_secrets((ROOT / f"Pulumi.{stack}.yaml").read_text()) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("config: {}\nsecretsprovider: gcpkms://projects/p\nencryptedkey: abc", []),
        ("config: {}\nsecretsprovider: passphrase", ["secretsprovider"]),
        ("config: {}\nencryptionsalt: v1:abc", ["encryptionsalt"]),
        ("config:\n  research-runtime:x:\n    secure: v1:abc", ["secure:"]),
    ],
)
def test_passphrase_or_secret_in_a_stack_file_is_noticed(text: str, found: list[str]) -> None:
    assert find_secrets(text) == found


@pytest.mark.parametrize("stack", STACKS)
def test_misspelt_key_in_a_stack_file_is_refused(stack: str) -> None:
    values = load(stack)["config"] | {"research-runtime:kubernets": {}}

    with pytest.raises(InvalidSettings) as invalid:
        settings_from(stack, values)

    assert [problem.path for problem in invalid.value.problems] == ["kubernets"]


@pytest.mark.parametrize("stack", STACKS)
def test_stack_breaks_no_policy(stack: str) -> None:
    found = recording_of(stack)

    assert apply_rules(found.resources, bounds_of(settings_of(stack))) == []
    if settings_of(stack).deployer is None:
        assert apply_rules(found.resources) == []


def test_every_exception_for_project_grants_is_needed_by_some_stack() -> None:
    used = set()
    for stack in STACKS:
        found = recording_of(stack)
        for grant in found.of_type(PROJECT_GRANT):
            if str(grant.inputs["role"]).startswith("roles/"):
                used.add((found.get(grant.parent or "").type, grant.inputs["role"]))

    assert set(PROJECT_ROLES) == used


def test_dev_is_the_smallest_stack_of_use() -> None:
    dev = settings_of("dev")

    assert (list(dev.queues), list(dev.registries), list(dev.secrets)) == (["default"], ["images"], ["hf-token"])
    assert dev.records is not None
    assert (dev.heads, dev.kubernetes, dev.network, dev.ci, dev.protect) == ({}, {}, None, None, False)


def test_phoebe_needs_no_google_project() -> None:
    phoebe = settings_of("phoebe")
    namespace = phoebe.kubernetes["phoebe"].namespaces["l2r"]

    assert (phoebe.project, phoebe.uses_google) == (None, False)
    assert namespace.claims["l2r-persistent-claim"].size == "20Gi"
    assert namespace.quota["requests.nvidia.com/gpu"] == "24"


@pytest.mark.parametrize(
    ("stack", "region", "zone", "accelerator"),
    [
        ("marin-us-central2", "us-central2", "us-central2-b", "v4-8"),
        ("marin-us-west4", "us-west4", "us-west4-a", "v5litepod-1"),
        ("marin-eu-west4", "europe-west4", "europe-west4-b", "v5litepod-1"),
    ],
)
def test_marin_cluster_is_what_its_guide_describes(stack: str, region: str, zone: str, accelerator: str) -> None:
    marin = settings_of(stack)
    head = marin.heads["main"]
    (pool,) = head.pools.values()

    assert (marin.project, marin.region, marin.zone, marin.protect) == ("hai-gcp-models", region, zone, True)
    assert (head.machine_type, head.disk_gb) == ("n2-standard-8", 200)
    assert (pool.accelerator, pool.min, pool.max, pool.capacity.value) == (accelerator, 4, 1024, "preemptible")
    # The guide's 120 are half of a v4-8 host. A v5litepod-1 host has 24 CPUs.
    assert cpus_per_host(pool) == {"v4-8": 120, "v5litepod-1": 12}[accelerator]


def test_marin_stacks_share_what_one_of_them_makes() -> None:
    pipeline, owner, *others = (settings_of(stack) for stack in ("marin-pipeline", *MARIN))
    made = {
        region: f"projects/{owner.project}/locations/{region}/repositories/{owner.registries['images'].repository}"
        for region in owner.registries["images"].regions
    }
    resources = recording_of(owner.stack).resources
    secrets = {each.inputs["secretId"] for each in resources if each.type == "gcp:secretmanager/secret:Secret"}

    for other in others:
        assert other.registries["images"].existing == made
        assert {each.existing for each in other.secrets.values()} == {
            f"projects/{owner.project}/secrets/{one}" for one in secrets
        }
    for stack in (owner, *others):
        assert stack.access == pipeline.access
        assert stack.deployer == f"marin-pipeline-deployer@{pipeline.project}.iam.gserviceaccount.com"


def test_marin_networks_do_not_overlap_so_that_they_can_be_joined() -> None:
    ranges = [network.cidr for stack in MARIN if (network := settings_of(stack).network)]

    assert len(set(ranges)) == len(MARIN)


def find_undocumented(text: str) -> set[str]:
    """Return the keys of settings without a row in the reference."""
    parts = [
        each
        for each in vars(config).values()
        if isinstance(each, type) and is_dataclass(each) and each.__module__ == config.__name__
    ]
    keys = {each.name for part in parts for each in fields(part)} - {"stack"}
    rows = set(re.findall(r"^\| `(?:budget\.)?([a-z_]+)`", text, re.MULTILINE))
    headings = set(re.findall(r"^## `([a-z_]+)", text, re.MULTILINE))
    return keys - rows - headings - {"budget"}


def test_reference_has_every_key() -> None:
    assert find_undocumented((ROOT / "docs" / "settings.md").read_text()) == set()


def test_key_that_the_reference_lacks_is_noticed() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()

    assert find_undocumented(text.replace("| `idle_minutes`", "| `idle`")) == {"idle_minutes"}


def _as_text(value: Any) -> str:
    """Convert a value as the engine passes it to the program."""
    return value if isinstance(value, str) else json.dumps(value)
