"""Outputs that Google adds to a new resource, as far as they are known beforehand: ids, e-mail addresses, self-links.

`compute` fills recordings with it, so that `check` can show the contract; the rest stays `UNKNOWN`. Outputs with the
project's number (service agents, identity pools, a secret's own `name`) are in the rest: the number is in no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from infra.check.recording import UNKNOWN, SecretValue, UnknownValue, is_grant
from infra.naming import account_domain
from runtime.outputs import image_path

Inputs: TypeAlias = Mapping[str, Any]
Outputs: TypeAlias = dict[str, Any]


def compute(type_: str, name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the outputs of a resource of this program, as a `recording.Compute`."""
    if type_ in PATTERNS:
        parts = dict(inputs)
        if isinstance(project := inputs.get("project"), str):
            parts |= {"accounts": account_domain(project), "images": image_path(project)}
        found = {key: join(pattern, parts) for key, pattern in PATTERNS[type_].items()}
        if type_ == "gcp:compute/instance:Instance":
            found["networkInterfaces"] = _interfaces(inputs.get("networkInterfaces"))
        if "labels" in inputs:
            # The provider adds its default labels, which no recording has.
            found |= {"effectiveLabels": UNKNOWN, "pulumiLabels": UNKNOWN}
        return found
    if is_grant(type_):
        return _grant(inputs)
    if type_.startswith("kubernetes:"):
        return _kubernetes(inputs)
    return {}


def join(pattern: str | bool | None, inputs: Inputs) -> Any:
    """Fill the `{keys}` of `pattern` from the inputs; `UNKNOWN` if one of them is, or for no pattern."""
    if pattern is None:
        return UNKNOWN
    if isinstance(pattern, bool):
        return pattern
    values = {key: value.value if isinstance(value, SecretValue) else value for key, value in inputs.items()}
    needed = [part.split("}")[0] for part in pattern.split("{")[1:]]
    if not all(isinstance(values.get(key), str) and values[key] for key in needed):
        return UNKNOWN
    return pattern.format_map(values)


def _interfaces(faces: Any) -> Any:
    if not isinstance(faces, list):
        return faces
    return [{"networkIp": UNKNOWN, "name": UNKNOWN} | each if isinstance(each, dict) else each for each in faces]


def _grant(inputs: Inputs) -> Outputs:
    """Return the id of a grant: its resource with the place, the role and the member."""
    places = [key for key in ("project", "location", "region", "zone") if key in inputs]
    others = sorted(key for key in inputs if key not in (*places, "role", "member", "condition"))
    pattern = "/".join(f"{{{key}}}" for key in [*places, *others, "role", "member"])
    return {"id": join(pattern, inputs), "etag": UNKNOWN}


def _kubernetes(inputs: Inputs) -> Outputs:
    metadata = inputs.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        return {"id": UNKNOWN}
    space, name = metadata.get("namespace"), metadata["name"]
    if isinstance(space, UnknownValue):
        return {"id": UNKNOWN}
    return {"id": f"{space}/{name}" if space else name}


def _located(place: str, **more: str | None) -> dict[str, str | None]:
    """Outputs of a resource of Compute Engine at `place`, below its project."""
    path = f"projects/{{project}}/{place}/{{name}}"
    link = f"https://www.googleapis.com/compute/v1/{path}"
    return {"id": path, "selfLink": link, **more}


_EMAIL: Final = "{accountId}@{accounts}"
_ACCOUNT: Final = f"projects/{{project}}/serviceAccounts/{_EMAIL}"
_POOL: Final = "projects/{project}/locations/global/workloadIdentityPools/{workloadIdentityPoolId}"
_ROLE: Final = "projects/{project}/roles/{roleId}"
_NAMED_BY_GOOGLE: Final = {"id": None, "name": None}

PATTERNS: Final[Mapping[str, Mapping[str, str | bool | None]]] = {
    "gcp:artifactregistry/repository:Repository": {
        "id": "projects/{project}/locations/{location}/repositories/{repositoryId}",
        "name": "{repositoryId}",
        "registryUri": "{location}-docker.pkg.dev/{images}/{repositoryId}",
    },
    "gcp:billing/budget:Budget": _NAMED_BY_GOOGLE,
    "gcp:compute/address:Address": _located("regions/{region}/addresses", address=None),
    "gcp:compute/disk:Disk": _located("zones/{zone}/disks"),
    "gcp:compute/diskResourcePolicyAttachment:DiskResourcePolicyAttachment": {"id": "{project}/{zone}/{disk}/{name}"},
    "gcp:compute/firewall:Firewall": _located("global/firewalls"),
    "gcp:compute/instance:Instance": _located("zones/{zone}/instances"),
    "gcp:compute/network:Network": _located("global/networks"),
    "gcp:compute/resourcePolicy:ResourcePolicy": _located("regions/{region}/resourcePolicies"),
    "gcp:compute/router:Router": _located("regions/{region}/routers"),
    "gcp:compute/routerNat:RouterNat": {"id": "{project}/{region}/{router}/{name}"},
    "gcp:compute/subnetwork:Subnetwork": _located("regions/{region}/subnetworks"),
    "gcp:iam/workloadIdentityPool:WorkloadIdentityPool": {"id": _POOL, "name": None},
    "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider": {
        "id": f"{_POOL}/providers/{{workloadIdentityPoolProviderId}}",
        "name": None,
    },
    "gcp:monitoring/alertPolicy:AlertPolicy": _NAMED_BY_GOOGLE,
    "gcp:monitoring/notificationChannel:NotificationChannel": _NAMED_BY_GOOGLE,
    "gcp:projects/iAMCustomRole:IAMCustomRole": {"id": _ROLE, "name": _ROLE},
    "gcp:projects/service:Service": {"id": "{project}/{service}"},
    "gcp:projects/serviceIdentity:ServiceIdentity": {
        "id": "projects/{project}/services/{service}",
        "email": None,
        "member": None,
    },
    "gcp:pubsub/subscription:Subscription": {"id": "projects/{project}/subscriptions/{name}"},
    "gcp:pubsub/topic:Topic": {"id": "projects/{project}/topics/{name}"},
    # Google answers with the project's number in `name` and the provider with its id in `id`.
    "gcp:secretmanager/secret:Secret": {"id": "projects/{project}/secrets/{secretId}", "name": None},
    "gcp:serviceaccount/account:Account": {
        "id": _ACCOUNT,
        "name": _ACCOUNT,
        "email": _EMAIL,
        "member": f"serviceAccount:{_EMAIL}",
    },
    "gcp:storage/bucket:Bucket": {
        "id": "{name}",
        "url": "gs://{name}",
        "selfLink": "https://www.googleapis.com/storage/v1/b/{name}",
    },
}
"""Type → output that the program may read → its pattern; None if only the cloud knows the output."""
