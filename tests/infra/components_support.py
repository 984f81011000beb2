"""Builders and queries shared by the component tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pulumi
import pulumi_gcp

from infra.check.recording import Recording, Registration, record
from infra.components.apis import Apis, ApisArgs
from infra.components.shared import StackSite
from infra.gcp.outputs import compute
from infra.naming import Names, labels
from tests.infra.provider_types import find_input_problems

PROJECT = "lab-1234"
REGION = "us-west4"
STACK = "marin"
LABELS = {"managed-by": "research-runtime", "stack": "marin", "team": "ml"}

SERVICES = (
    "serviceusage",
    "iam",
    "cloudresourcemanager",
    "pubsub",
    "storage",
    "artifactregistry",
    "secretmanager",
    "compute",
    "monitoring",
    "billingbudgets",
    "iamcredentials",
    "sts",
    "cloudbilling",
    "cloudkms",
)


NODE_ROLES = {kind: f"projects/{PROJECT}/roles/research_runtime_{kind}" for kind in ("head", "reaper")}


def sample_site(**changes: Any) -> StackSite:
    own: dict[str, Any] = {
        "project": PROJECT,
        "region": REGION,
        "names": Names(stack=STACK, project=PROJECT),
        "labels": labels(STACK, {"team": "ml"}),
    }
    return StackSite(**(own | changes))


def run(program: Callable[[pulumi.ResourceOptions], object], *, preview: bool = True) -> Recording:
    """Record the resources that `program` registers, with an explicit provider in its options."""

    def whole() -> None:
        provider = pulumi_gcp.Provider("google", project=PROJECT, region=REGION)
        program(pulumi.ResourceOptions(providers=[provider]))

    return record(whole, stack=STACK, compute=_known, preview=preview)


def make_apis(opts: pulumi.ResourceOptions, *services: str) -> Apis:
    chosen = services or SERVICES
    agents = ["pubsub"] if "pubsub" in chosen else []
    return Apis("apis", ApisArgs(project=PROJECT, services=chosen, agents=agents), opts)


AGENT = "serviceAccount:service-12@gcp-sa-pubsub.iam.gserviceaccount.com"
POOL = "projects/12/locations/global/workloadIdentityPools/marin-ci"


def _known(type_: str, name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Compute outputs as after an `up`, when even the project numbers are known."""
    outputs = dict(compute(type_, name, inputs))
    if type_ == "gcp:projects/serviceIdentity:ServiceIdentity":
        outputs["member"] = AGENT
    if type_ == "gcp:iam/workloadIdentityPool:WorkloadIdentityPool":
        outputs["name"] = POOL
    if type_ == "gcp:monitoring/notificationChannel:NotificationChannel":
        outputs["name"] = f"projects/{PROJECT}/notificationChannels/{name}"
    return outputs


Grant = tuple[str, str, str]
"""Member, role, and the resource (type and name) that carries the grant."""

_TARGETS = ("topic", "subscription", "bucket", "repository", "secretId", "serviceAccountId")


def find_grants(recording: Recording) -> set[Grant]:
    return {
        (each.inputs["member"], each.inputs["role"], _target(each))
        for each in recording.resources
        if each.type.lower().endswith("iammember")
    }


def _target(grant: Registration) -> str:
    for key in _TARGETS:
        if key in grant.inputs:
            place = f"{grant.inputs['location']}/" if "location" in grant.inputs else ""
            return f"{key} {place}{grant.inputs[key]}"
    return f"project {grant.inputs['project']}"


def customs(recording: Recording, under: str) -> list[Registration]:
    """Return the resources of the component of type `under`, without the provider and the APIs."""
    return [each for each in recording.resources if each.custom and f"{under}$" in each.urn]


def assert_sound(recording: Recording, under: str) -> None:
    """Assert the rules for every resource of every component."""
    resources = customs(recording, under)
    (component,) = {each.parent for each in resources}
    assert component is not None
    named = component.rsplit("::", 1)[-1]
    for each in resources:
        assert each.name.startswith(f"{named}-"), each.urn
        assert each.provider is not None, each.urn
        assert "pulumi:providers:gcp::google" in each.provider, each.urn
        assert find_input_problems(each.type, each.inputs) == [], each.urn
    assert set(recording.get(component).outputs) != set()


def depends_on(recording: Recording, resource: Registration, urn: str) -> bool:
    """Return whether `resource` depends on `urn`, directly or indirectly."""
    seen: set[str] = set()
    waiting = [resource.urn]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        waiting.extend(recording.get(current).dependencies)
    return urn in seen


def assert_waits_for(recording: Recording, under: str, *services: str) -> None:
    for service in services:
        enabled = recording.named("gcp:projects/service:Service", f"apis-{service}")
        for each in customs(recording, under):
            assert depends_on(recording, each, enabled.urn), (each.urn, service)
