"""Outputs that Google adds to a new resource, as far as they are known beforehand: ids, e-mail addresses, self-links.

`compute` fills recordings with it, so that `check` can show the contract; the rest stays `UNKNOWN`. Outputs with the
project's number (service agents, identity pools, a secret's own `name`) are in the rest: the number is in no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from infra.check.recording import UNKNOWN, Secret, Unknown

Inputs: TypeAlias = Mapping[str, Any]
Outputs: TypeAlias = dict[str, Any]

COMPUTE: Final = "https://www.googleapis.com/compute/v1/"


def compute(type_: str, name: str, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A `recording.Compute` for the resource types of this program."""
    maker = MAKERS.get(type_)
    if maker is not None:
        return _with_labels(inputs, maker(inputs))
    if type_.startswith("gcp:") and type_.endswith(("IAMMember", "IamMember")):
        return _grant(inputs)
    if type_.startswith("kubernetes:"):
        return _kubernetes(inputs)
    return {}


def join(pattern: str, inputs: Inputs, **more: Any) -> Any:
    """`pattern` with its `{keys}` taken from the inputs, or `UNKNOWN` if one of them is."""
    values = {key: _bare(value) for key, value in {**inputs, **more}.items()}
    needed = [part.split("}")[0] for part in pattern.split("{")[1:]]
    if not all(isinstance(values.get(key), str) and values[key] for key in needed):
        return UNKNOWN
    return pattern.format_map(values)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Secret) else value


def _with_labels(inputs: Inputs, outputs: Outputs) -> Outputs:
    if "labels" in inputs and "effectiveLabels" not in outputs:
        # The provider adds its default labels, which no recording knows.
        return {**outputs, "effectiveLabels": UNKNOWN, "pulumiLabels": UNKNOWN}
    return outputs


def _topic(inputs: Inputs) -> Outputs:
    return {"id": join("projects/{project}/topics/{name}", inputs)}


def _subscription(inputs: Inputs) -> Outputs:
    return {"id": join("projects/{project}/subscriptions/{name}", inputs)}


def _account(inputs: Inputs) -> Outputs:
    email = join("{accountId}@{project}.iam.gserviceaccount.com", inputs)
    path = join("projects/{project}/serviceAccounts/{email}", inputs, email=email)
    return {
        "id": path,
        "name": path,
        "email": email,
        "member": join("serviceAccount:{email}", {}, email=email),
        "uniqueId": UNKNOWN,
    }


def _custom_role(inputs: Inputs) -> Outputs:
    path = join("projects/{project}/roles/{roleId}", inputs)
    return {"id": path, "name": path, "deleted": False}


def _service(inputs: Inputs) -> Outputs:
    return {"id": join("{project}/{service}", inputs)}


def _service_identity(inputs: Inputs) -> Outputs:
    return {"id": join("projects/{project}/services/{service}", inputs), "email": UNKNOWN, "member": UNKNOWN}


def _bucket(inputs: Inputs) -> Outputs:
    return {
        "id": join("{name}", inputs),
        "url": join("gs://{name}", inputs),
        "selfLink": join("https://www.googleapis.com/storage/v1/b/{name}", inputs),
        "projectNumber": UNKNOWN,
        "timeCreated": UNKNOWN,
        "updated": UNKNOWN,
    }


def _repository(inputs: Inputs) -> Outputs:
    return {
        "id": join("projects/{project}/locations/{location}/repositories/{repositoryId}", inputs),
        "name": join("{repositoryId}", inputs),
        "registryUri": join("{location}-docker.pkg.dev/{project}/{repositoryId}", inputs),
        "createTime": UNKNOWN,
        "updateTime": UNKNOWN,
    }


def _secret(inputs: Inputs) -> Outputs:
    # Google answers with the project's number in `name` and the provider with its id in `id`.
    return {"id": join("projects/{project}/secrets/{secretId}", inputs), "name": UNKNOWN, "createTime": UNKNOWN}


def _global(collection: str) -> Callable[[Inputs], Outputs]:
    return _located(f"projects/{{project}}/global/{collection}/{{name}}")


def _regional(collection: str) -> Callable[[Inputs], Outputs]:
    return _located(f"projects/{{project}}/regions/{{region}}/{collection}/{{name}}")


def _zonal(collection: str) -> Callable[[Inputs], Outputs]:
    return _located(f"projects/{{project}}/zones/{{zone}}/{collection}/{{name}}")


def _located(pattern: str) -> Callable[[Inputs], Outputs]:
    def make(inputs: Inputs) -> Outputs:
        path = join(pattern, inputs)
        return {"id": path, "selfLink": join(COMPUTE + "{path}", {}, path=path), "creationTimestamp": UNKNOWN}

    return make


def _subnetwork(inputs: Inputs) -> Outputs:
    return {**_regional("subnetworks")(inputs), "gatewayAddress": UNKNOWN, "subnetworkId": UNKNOWN}


def _network(inputs: Inputs) -> Outputs:
    return {**_global("networks")(inputs), "networkId": UNKNOWN, "numericId": UNKNOWN}


def _address(inputs: Inputs) -> Outputs:
    return {**_regional("addresses")(inputs), "address": inputs.get("address", UNKNOWN)}


def _nat(inputs: Inputs) -> Outputs:
    return {"id": join("{project}/{region}/{router}/{name}", inputs)}


def _instance(inputs: Inputs) -> Outputs:
    faces = inputs.get("networkInterfaces")
    if isinstance(faces, list):
        faces = [{"networkIp": UNKNOWN, "name": UNKNOWN} | each if isinstance(each, dict) else each for each in faces]
    return {
        **_zonal("instances")(inputs),
        "networkInterfaces": faces,
        "instanceId": UNKNOWN,
        "cpuPlatform": UNKNOWN,
        "currentStatus": UNKNOWN,
        "metadataFingerprint": UNKNOWN,
        "tagsFingerprint": UNKNOWN,
    }


def _pool(inputs: Inputs) -> Outputs:
    path = "projects/{project}/locations/global/workloadIdentityPools/{workloadIdentityPoolId}"
    return {"id": join(path, inputs), "name": UNKNOWN, "state": UNKNOWN}


def _pool_provider(inputs: Inputs) -> Outputs:
    path = (
        "projects/{project}/locations/global/workloadIdentityPools/{workloadIdentityPoolId}"
        "/providers/{workloadIdentityPoolProviderId}"
    )
    return {"id": join(path, inputs), "name": UNKNOWN, "state": UNKNOWN}


def _named_by_google(inputs: Inputs) -> Outputs:
    return {"id": UNKNOWN, "name": UNKNOWN}


def _metric(inputs: Inputs) -> Outputs:
    return {"id": join("{name}", inputs)}


def _grant(inputs: Inputs) -> Outputs:
    """An id of Google's grants is the resource with its place, the role and the member."""
    places = [key for key in ("project", "location", "region", "zone") if key in inputs]
    others = sorted(key for key in inputs if key not in (*places, "role", "member", "condition"))
    pattern = "/".join(f"{{{key}}}" for key in [*places, *others, "role", "member"])
    return {"id": join(pattern, inputs), "etag": UNKNOWN}


def _kubernetes(inputs: Inputs) -> Outputs:
    metadata = inputs.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        return {"id": UNKNOWN}
    space, name = metadata.get("namespace"), metadata["name"]
    if isinstance(space, Unknown):
        return {"id": UNKNOWN}
    return {"id": f"{space}/{name}" if space else name}


MAKERS: Final[Mapping[str, Callable[[Inputs], Outputs]]] = {
    "gcp:artifactregistry/repository:Repository": _repository,
    "gcp:billing/budget:Budget": _named_by_google,
    "gcp:compute/address:Address": _address,
    "gcp:compute/disk:Disk": _zonal("disks"),
    "gcp:compute/firewall:Firewall": _global("firewalls"),
    "gcp:compute/instance:Instance": _instance,
    "gcp:compute/network:Network": _network,
    "gcp:compute/resourcePolicy:ResourcePolicy": _regional("resourcePolicies"),
    "gcp:compute/router:Router": _regional("routers"),
    "gcp:compute/routerNat:RouterNat": _nat,
    "gcp:compute/subnetwork:Subnetwork": _subnetwork,
    "gcp:iam/workloadIdentityPool:WorkloadIdentityPool": _pool,
    "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider": _pool_provider,
    "gcp:logging/metric:Metric": _metric,
    "gcp:monitoring/alertPolicy:AlertPolicy": _named_by_google,
    "gcp:monitoring/notificationChannel:NotificationChannel": _named_by_google,
    "gcp:projects/iAMCustomRole:IAMCustomRole": _custom_role,
    "gcp:projects/service:Service": _service,
    "gcp:projects/serviceIdentity:ServiceIdentity": _service_identity,
    "gcp:pubsub/subscription:Subscription": _subscription,
    "gcp:pubsub/topic:Topic": _topic,
    "gcp:secretmanager/secret:Secret": _secret,
    "gcp:serviceaccount/account:Account": _account,
    "gcp:storage/bucket:Bucket": _bucket,
}
