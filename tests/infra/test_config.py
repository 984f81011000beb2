"""Settings: how they are parsed, and the message for every wrong stack file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.check.recording import record
from infra.settings.cluster_rules import quantity
from infra.settings.model import (
    AccessSettings,
    AlertSettings,
    ClaimSettings,
    HeadSettings,
    NamespaceSettings,
    NetworkSettings,
    QueueSettings,
    RecordsSettings,
    Role,
    SecretSettings,
    StackSettings,
    TpuCapacity,
    TpuPoolSettings,
)
from infra.settings.read import InvalidSettings, ensure_valid, find_problems, parse_settings, settings_from
from runtime.schema import Problem

DIGEST = "sha256:" + "0" * 64
IMAGE = f"us-west4-docker.pkg.dev/my-lab/marin/cluster@{DIGEST}"
POOL = {"accelerator": "v5litepod-1", "runtime_version": "v2-alpha-tpuv5-lite"}
CLOSED_DOOR = {"pulumi:disable-default-providers": '["*"]'}

GOOD: dict[str, Any] = {
    "project": "my-lab",
    "region": "us-west4",
    "zone": "us-west4-a",
    "network": {"cidr": "10.64.0.0/20"},
    "queues": {"default": {}},
    "records": {"location": "us-west4"},
    "registries": {"images": {"repository": "marin"}},
    "secrets": {"hf-token": {"env": "HF_TOKEN", "readers": ["worker"]}},
    "heads": {"main": {"image": IMAGE, "environment": ["hf-token"], "pools": {"v5e": POOL}}},
    "kubernetes": {
        "lab": {
            "context": "lab",
            "cluster_identifier": "lab-1",
            "server": "https://lab.example.com:6443",
            "namespaces": {"train": {"quota": {"pods": "200"}, "claims": {"scratch": {"size": "1Ti"}}}},
        }
    },
    "access": {"operators": ["group:ops@example.com"]},
    "alerts": {"emails": ["ops@example.com"]},
    "labels": {"team": "vision"},
}


PIPELINE: dict[str, Any] = {
    "project": "my-lab",
    "region": "us-west4",
    "ci": {"repositories": {"lab/runtime": {"repository_id": 12, "owner_id": 34}}},
}


OTHERS = "iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/hpc"
PIPELINES = "pipeline@my-lab.iam.gserviceaccount.com"
WRITTEN = {"writers": ["workers"]}
REPOSITORY = "ci/repositories/lab^runtime"


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return `GOOD`, or for a path in `ci` `PIPELINE`, with one value set; None removes the key."""
    copy: dict[str, Any] = json.loads(json.dumps(PIPELINE if path.startswith("ci/") else GOOD))
    *parents, last = (part.replace("^", "/") for part in path.split("/"))
    place = copy
    for key in parents:
        place = place.setdefault(key, {})
    if value is None:
        place.pop(last)
    else:
        place[last] = value
    return copy


def problems_of(values: Mapping[str, Any]) -> tuple[Problem, ...]:
    with pytest.raises(InvalidSettings) as invalid:
        parse_settings("west", values)
    return invalid.value.problems


def find_paths(values: Mapping[str, Any]) -> list[str]:
    """List the paths of all problems; empty if the settings are usable."""
    try:
        parse_settings("west", values)
    except InvalidSettings as invalid:
        return [problem.path for problem in invalid.problems]
    return []


def test_good_settings_are_read_into_their_types() -> None:
    assert parse_settings(
        "west", {"project": "my-lab", "region": "us-west4", "queues": {"a": {"ack_deadline_s": 30}}}
    ) == (
        StackSettings(stack="west", project="my-lab", region="us-west4", queues={"a": QueueSettings(ack_deadline_s=30)})
    )


def test_settings_with_every_part_have_no_problem_and_keep_all_of_it() -> None:
    read = parse_settings("west", GOOD)

    assert read.heads["main"].pools["v5e"] == TpuPoolSettings(
        accelerator="v5litepod-1", runtime_version="v2-alpha-tpuv5-lite", capacity=TpuCapacity.PREEMPTIBLE
    )
    assert read.secrets["hf-token"] == SecretSettings(env="HF_TOKEN", readers=(Role.WORKER,))
    assert read.kubernetes["lab"].namespaces["train"] == NamespaceSettings(
        quota={"pods": "200"}, claims={"scratch": ClaimSettings(size="1Ti")}
    )
    assert read.access == AccessSettings(operators=("group:ops@example.com",))
    assert find_problems(read) == []


def test_settings_as_the_engine_passes_them_read_the_same() -> None:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in GOOD.items()}

    assert parse_settings("west", texts) == parse_settings("west", GOOD)


def test_quoted_numbers_and_booleans_read_like_bare_ones() -> None:
    quoted = {"queues": {"a": {"ack_deadline_s": "30", "exactly_once": "false"}}, "protect": "false"}
    bare = {"queues": {"a": {"ack_deadline_s": 30, "exactly_once": False}}, "protect": False}
    place = {"project": "my-lab", "region": "us-west4"}

    assert parse_settings("west", place | quoted) == parse_settings("west", place | bare)


def test_empty_text_and_empty_entry_are_the_defaults() -> None:
    read = parse_settings("west", {"project": "my-lab", "region": "us-west4", "zone": "", "queues": {"a": None}})

    assert read == StackSettings(stack="west", project="my-lab", region="us-west4", queues={"a": QueueSettings()})


EMPTY = [
    ("queues", "write `{}` for none, or leave it out"),
    ("registries", "write `{}` for none, or leave it out"),
    ("labels", "write `{}` for none, or leave it out"),
    ("access", "write at least one of its keys, or leave it out"),
    ("overrides", "write at least one of its keys, or leave it out"),
    ("alerts/budget", "write at least one of its keys, or leave it out"),
    ("heads/main/pools", "write `{}` for none, or leave it out"),
    ("heads/main/environment", "write `[]` for none, or leave it out"),
    ("secrets/hf-token/readers", "write `[]` for none, or leave it out"),
    ("kubernetes/lab/namespaces/train/quota", "write `{}` for none, or leave it out"),
    ("kubernetes/lab/namespaces/train/claims", "write `{}` for none, or leave it out"),
]


@pytest.mark.parametrize(("where", "hint"), EMPTY, ids=[where for where, _ in EMPTY])
def test_empty_key_where_an_object_or_a_list_belongs_is_refused(where: str, hint: str) -> None:
    values = json.loads(json.dumps(changed(where, "<empty>")).replace('"<empty>"', "null"))
    found = [each for each in problems_of(values) if each.path == where.replace("/", ".")]
    assert [(each.message, each.hint) for each in found][:1] == [("is empty", hint)]


TOO_LONG = "a" * 41
WRONG: list[tuple[str, Any, str, str]] = [
    # path of the change, value, path of the problem, text that its line must contain
    # types and keys
    ("regoin", "us-west4", "regoin", "did you mean `region`?"),
    ("queues/default/ack_deadline", 60, "queues.default.ack_deadline", "did you mean `ack_deadline_s`?"),
    (
        "heads/main/pools/v5e/maximum",
        3,
        "heads.main.pools.v5e.maximum",
        "allowed are accelerator, buffer, capacity, container, cpus",
    ),
    ("queues/default/ack_deadline_s", 1.5, "queues.default.ack_deadline_s", "is 1.5, allowed is a whole number"),
    ("queues/default/ack_deadline_s", True, "queues.default.ack_deadline_s", "is true, allowed is a whole number"),
    ("queues/default/ack_deadline_s", "soon", "queues.default.ack_deadline_s", "is `soon`"),
    ("queues/default/ack_deadline_s", "6_0", "queues.default.ack_deadline_s", "is `6_0`"),
    ("queues/two\nlines", {}, "queues.two\nlines", "`queues.two\\nlines` is no name"),
    ("queues/default/exactly_once", "yes", "queues.default.exactly_once", "allowed is true or false"),
    ("queues", "default", "queues", "allowed is an object with keys"),
    ("queues", ["default"], "queues", "is a list, allowed is an object with keys"),
    ("registries/images/regions", "us-west4", "registries.images.regions", "write `[us-west4]`"),
    ("labels/team", 5, "labels.team", 'put it in quotes: "5"'),
    ("labels/team", True, "labels.team", 'put it in quotes: "true"'),
    ("ci/repositories/lab^runtime/repository_id", None, "ci.repositories.lab/runtime", "lacks `repository_id`"),
    ("secrets/hf-token/env", None, "secrets.hf-token", "lacks `env`"),
    ("project", {"secure": "v1:abc"}, "project", "is encrypted"),
    ("secrets/hf-token/value", {"secure": "v1:abc"}, "secrets.hf-token.value", "no setting is a secret"),
    # place
    ("project", None, "project", "is not set, and"),
    ("project", "My_Lab", "project", "is `My_Lab`"),
    ("project", "123456789", "project", "that is its number"),
    ("region", "us-west", "region", "did you mean `us-west4`?"),
    ("region", "us-west4-a", "region", "its region is `us-west4`"),
    ("zone", "us-west1-a", "zone", "a zone of the region `us-west4`"),
    ("zone", None, "zone", "us-west4-a has the pools' accelerators"),
    ("impersonate", "me@example.com", "impersonate", "a service account"),
    ("labels/Team", "x", "labels.Team", "is no label key"),
    ("labels/team", "Vision!", "labels.team", "is `Vision!`"),
    ("labels/goog-x", "y", "labels.goog-x", "keeps for itself"),
    ("labels/stack", "y", "labels.stack", "every resource gets from us"),
    # network
    ("network/cidr", "10.64.0.1/20", "network.cidr", "no host bits"),
    ("network/cidr", "10.64.0.0/30", "network.cidr", "at least a /29"),
    *(
        ("network/cidr", f"10.64.0.0{mask}", "network.cidr", "the length of its prefix")
        for mask in ("/255.255.240.0", "/0.0.15.255", "/020", "")
    ),
    ("network/cidr", "8.8.0.0/16", "network.cidr", "a private IPv4 range"),
    ("network/cidr", "fd00::/64", "network.cidr", "a private IPv4 range"),
    ("network/cidr", "172.16.0.0/15", "network.cidr", "containers on the head use"),
    ("network/subnet", "my-subnet", "network.subnet", "a self-link"),
    (
        "network",
        {"subnet": "projects/1234567/regions/us-west4/subnetworks/s"},
        "network.subnet",
        "the project's id, not its number",
    ),
    (
        "network",
        {"subnet": "projects/host/regions/us-west4/subnetworks/s", "network": "projects/my-lab/global/networks/n"},
        "network.network",
        "a network of the subnet's project, `host`",
    ),
    (
        "network/subnet",
        "projects/p/regions/us-east1/subnetworks/s",
        "network.subnet",
        "a subnet in the region `us-west4`",
    ),
    ("network", None, "network", "is not set, and `heads` need it"),
    # queues
    ("queues/default/ack_deadline_s", 9, "queues.default.ack_deadline_s", "is 9, allowed are 10 to 600"),
    ("queues/default/max_delivery_attempts", 101, "queues.default.max_delivery_attempts", "allowed are 5 to 100"),
    ("queues/default/retention_s", 2_678_401, "queues.default.retention_s", "allowed are 600 to 2,678,400"),
    ("queues/default/max_backoff_s", 601, "queues.default.max_backoff_s", "allowed are 0 to 600"),
    (
        "queues/default",
        {"min_backoff_s": 20, "max_backoff_s": 10},
        "queues.default.min_backoff_s",
        "at most `max_backoff_s`",
    ),
    ("queues/Default Queue", {}, "queues.Default Queue", "did you mean `default-queue`?"),
    (f"queues/{TOO_LONG}", {}, f"queues.{TOO_LONG}", "is no name"),
    ("queues/default-dead", {}, "queues.default-dead", "the dead letters of `default`"),
    # records
    ("records/soft_delete_days", 3, "records.soft_delete_days", "allowed are 0, or 7 to 90"),
    ("records/bucket", "My.Bucket", "records.bucket", "is `My.Bucket`"),
    ("records/bucket", "my-google-bucket", "records.bucket", "is `my-google-bucket`"),
    ("records/logs_days", 0, "records.logs_days", "allowed are 1 to 3,650"),
    ("records/location", "mars", "records.location", "is `mars`"),
    # registries
    ("registries/images/regions", ["us-west"], "registries.images.regions[0]", "did you mean `us-west4`?"),
    ("registries/images/regions", ["us-west4", "us-west4"], "registries.images.regions", "2 times"),
    ("registries/images/existing", {"us-west1": "marin"}, "registries.images.existing.us-west1", "is `marin`"),
    (
        "registries/images/existing",
        {"us-west1": "projects/p/locations/us-east1/repositories/r"},
        "registries.images.existing.us-west1",
        "a repository in us-west1",
    ),
    ("registries/images/pull_through", "dockr.io", "registries.images.pull_through", "did you mean `docker.io`?"),
    ("registries/images/repository", "Marin", "registries.images.repository", "is `Marin`"),
    ("registries/other", {"repository": "marin"}, "registries.other.repository", "`registries.images` makes"),
    (
        "registries",
        {"images": {"repository": "marin", "pull_through": "docker.io"}, "images-cache": {}},
        "registries.images-cache.repository",
        "west-images-cache that `registries.images` makes",
    ),
    # secrets
    ("secrets/hf-token/env", "HF-TOKEN", "secrets.hf-token.env", "the name of a variable"),
    ("secrets/hf-token/env", "PATH", "secrets.hf-token.env", "neither the system nor the runtime"),
    *(
        ("secrets/hf-token/env", name, "secrets.hf-token.env", "neither the system nor the runtime")
        for name in (
            *("BASH_ENV", "ENV", "IFS", "PS4", "LD_AUDIT", "LD_PRELOAD", "LD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES"),
            *("PYTHONSTARTUP", "PYTHONPATH", "PYTHONHOME", "RAY_ADDRESS", "GOOGLE_APPLICATION_CREDENTIALS"),
            *("CLOUDSDK_CONFIG", "GIT_SSH_COMMAND", "NODE_OPTIONS", "PERL5OPT", "HTTPS_PROXY", "SSL_CERT_FILE"),
        )
    ),
    ("secrets/hf-token/env", "RUNTIME_STACK", "secrets.hf-token.env", "neither the system nor the runtime"),
    ("secrets/hf-token/env", "LD_AUDIT", "secrets.hf-token.env", "neither the system nor the runtime"),
    ("secrets/hf-token/attempts", "some", "secrets.hf-token.attempts", "is `some`"),
    ("secrets/other", {"env": "OTHER", "attempts": "all"}, "secrets.other.attempts", "workers may not read"),
    ("secrets/other", {"env": "HF_TOKEN"}, "secrets.other.env", "which `hf-token` has too"),
    ("secrets/hf-token/readers", ["wroker"], "secrets.hf-token.readers[0]", "did you mean `worker`?"),
    ("secrets/hf-token/readers", ["node"], "secrets.hf-token.readers[0]", "its head's `environment`"),
    ("secrets/hf-token/existing", "hf-token", "secrets.hf-token.existing", "is `hf-token`"),
    ("secrets/hf-token/existing", "projects/p/secrets/s/versions/1", "secrets.hf-token.existing", "without a version"),
    ("secrets/hf-token/regions", ["west"], "secrets.hf-token.regions[0]", "is `west`"),
    ("queues", {}, "secrets.hf-token.readers[0]", "without `queues` a stack has no account of that role"),
    # heads and pools
    ("heads/main/image", "marin:latest", "heads.main.image", "write 64 zeros until there is one"),
    ("heads/main/image", f"us-west4-docker.pkg.dev/my-lab/marni/c@{DIGEST}", "heads.main.image", "not of this stack"),
    ("heads/main/image", f"ghcr.io/stranger/c@{DIGEST}", "heads.main.image", "overrides: {images: [ghcr.io/stranger]}"),
    ("heads/main/image", f"docker.io/rayprojects/ray@{DIGEST}", "heads.main.image", "overrides"),
    ("heads/main/image", f"us-west4-docker.pkg.dev/stranger/r/c@{DIGEST}", "heads.main.image", "overrides"),
    (
        "heads/main/boot_image",
        "projects/stranger/global/images/debian-12-v20260915",
        "heads.main.boot_image",
        "overrides: {boot_image_projects: [stranger]}",
    ),
    ("heads/main/machine_type", "n2", "heads.main.machine_type", "a machine type such as"),
    ("heads/main/machine_type", "t2a-standard-8", "heads.main.machine_type", "an x86 machine"),
    *(
        ("heads/main/machine_type", machine, "heads.main.machine_type", "Ray's head needs 4")
        for machine in ("e2-small", "e2-highcpu-2", "n2-custom-2-2048")
    ),
    ("heads/main/machine_type", "c4a-standard-8", "heads.main.machine_type", "an x86 machine"),
    (
        "heads/main/boot_image",
        "projects/debian-cloud/global/images/debian-12-bookworm-arm64-v20260915",
        "heads.main.boot_image",
        "an image for x86 machines",
    ),
    *(
        ("heads/main/machine_type", machine, "heads.main.machine_type", allowed)
        for machine, allowed in (
            ("n2-custom-08-8192", "a machine type such as"),
            ("n2-custom-8-08192", "a machine type such as"),
            ("n2-custom-\u0668-8192", "a machine type such as"),
        )
    ),
    *(
        ("heads/main/image", f"{name}@{DIGEST}", "heads.main.image", "write 64 zeros")
        for name in (
            *("docker.io/rayproject/../evil/x", "docker.io/rayproject/./ray", "docker.io/rayproject/-ray", "-/a/b"),
            *(
                "us-west4-docker.pkg.dev/my-lab/marin",
                "us-west4-docker.pkg.dev/my-lab",
                "docker.io:\u0664/rayproject/ray",
            ),
        )
    ),
    ("overrides/images", ["."], "overrides.images[0]", "`HOST/PATH`"),
    ("overrides/images", ["docker.io/x/.."], "overrides.images[0]", "`HOST/PATH`"),
    *(
        ("heads/main/boot_image", f"projects/{name}", "heads.main.boot_image", "one version of an image")
        for name in (
            *("my-lab/global/images/a-", f"my-lab/global/images/{'a' * 64}"),
            *("ubuntu-os-cloud/global/images/ubuntu-2404-lts-amd64", "rocky-linux-cloud/global/images/rocky-linux-9"),
            "debian-cloud/global/images/debian-12-bookworm-v\uff12\uff10\uff12\uff15\uff10\uff11\uff10\uff11",
        )
    ),
    *(
        ("heads/main/container", {"options": [option]}, "heads.main.container.options[0]", said)
        for option, said in (
            ("--cpus=9999", "and `n2-standard-8` has 8 vCPUs"),
            ("--cpus=8.5", "and `n2-standard-8` has 8 vCPUs"),
            ("--cpuset-cpus=0-8", "and `n2-standard-8` has 8 vCPUs"),
            ("--cpuset-cpus=3-1", "ranges of CPUs that begin below their end"),
            ("--ulimit=nproc=10:5", "a soft limit of at most the hard one"),
            ("--ulimit=nproc=-1:5", "a soft limit of at most the hard one"),
            ("--cpus=\u0663", "a value of the form"),
            ("--cpus=0", "a value of the form"),
            ("--cpus=0.001", "a value of the form"),
            ("--cpus=0.1234", "a value of the form"),
        )
    ),
    (
        "heads/main/pools/v5e/container",
        {"options": ["--cpus=25"]},
        "heads.main.pools.v5e.container.options[0]",
        "and `v5litepod-1` has 24 vCPUs",
    ),
    (
        "heads/main",
        GOOD["heads"]["main"] | {"machine_type": "n2-standard-48", "container": {"options": ["--cpus=40"]}},
        "heads.main.container.options[0]",
        "and `v5litepod-1` has 24 vCPUs",
    ),
    ("heads/main/disk_gb", 10, "heads.main.disk_gb", "allowed are 50 to"),
    ("heads/main/boot_image", "debian-cloud/debian-12", "heads.main.boot_image", "one version of an image"),
    (
        "heads/main/boot_image",
        "projects/debian-cloud/global/images/family/debian-12",
        "heads.main.boot_image",
        "a family would replace the head",
    ),
    ("heads/main/environment", ["hf-tokn"], "heads.main.environment[0]", "did you mean `hf-token`?"),
    ("heads/main/pools/v5e/accelerator", "v5e-1", "heads.main.pools.v5e.accelerator", "did you mean `v5litepod-1`?"),
    ("heads/main/pools/v5e/accelerator", "v5litepod", "heads.main.pools.v5e.accelerator", "`FAMILY-N`"),
    ("heads/main/pools/v5e/accelerator", "v9-8", "heads.main.pools.v5e.cpus", "set `cpus`"),
    ("heads/main/pools/v5e/accelerator", "v5litepod-2", "heads.main.pools.v5e.cpus", "v5litepod-1, v5litepod-4"),
    *(
        (
            "heads/main/pools/v5e",
            POOL | {"accelerator": "v5litepod-16", "max": 8} | more,
            place,
            "come and go with work",
        )
        for more, place in (
            ({}, "heads.main.pools.v5e.min"),
            ({"min": 0, "buffer": 1}, "heads.main.pools.v5e.buffer"),
        )
    ),
    (
        "heads/main/pools/v5e/capacity",
        "cheap",
        "heads.main.pools.v5e.capacity",
        "preemptible, spot, reserved, on_demand",
    ),
    ("heads/main/zone", "us-east1-b", "heads.main.zone", "a zone of the region `us-west4`"),
    ("heads/main/pools/v5e/reservation", "mine", "heads.main.pools.v5e.reservation", "is no key here"),
    ("heads/main/pools/v5e/max", 1025, "heads.main.pools.v5e.max", "is 1,025, allowed are 0 to 1,024"),
    ("heads/main/pools/v5e/min", -1, "heads.main.pools.v5e.min", "is -1, allowed are 0 to 1,024"),
    ("heads/main/pools/v5e/max", 3, "heads.main.pools.v5e.min", "is 4, allowed is at most `max`, 3"),
    ("heads/main/pools/v5e/buffer", -1, "heads.main.pools.v5e.buffer", "is -1, allowed is 0 to `max`, 1024"),
    ("heads/main/pools/v5e/buffer", 1025, "heads.main.pools.v5e.buffer", "is 1025, allowed is 0 to `max`, 1024"),
    ("heads/main/pools/v5e/buffer", True, "heads.main.pools.v5e.buffer", "is true, allowed is a whole number"),
    (
        "heads/main/pools/v5e/runtime_version",
        "",
        "heads.main.pools.v5e.runtime_version",
        "is the usual one for v5litepod",
    ),
    ("heads/main/pools/v5e/runtime_version", "v2-alpha-tpuv6e", "heads.main.pools.v5e.runtime_version", "is for v6e"),
    ("heads/main/pools/v5e/cpus", 0, "heads.main.pools.v5e.cpus", "allowed are 1 to 24"),
    ("heads/main/pools/v5e/cpus", 120, "heads.main.pools.v5e.cpus", "1 to 24, the vCPUs of each host of `v5litepod-1`"),
    ("heads/main/pools/v5e/cpus", 25, "heads.main.pools.v5e.cpus", "leave it out for half of them, 12"),
    # Kubernetes
    ("kubernetes/lab/server", "http://lab", "kubernetes.lab.server", "begins with `https://`"),
    ("kubernetes/lab/context", " ", "kubernetes.lab.context", "a name without spaces"),
    ("kubernetes/lab/namespaces/Train", {"quota": {"pods": "1"}}, "kubernetes.lab.namespaces.Train", "lower case"),
    *(
        (f"kubernetes/lab/namespaces/{name}", value, f"kubernetes.lab.namespaces.{name}", "of the cluster's own")
        for name in ("default", "kube-system", "kube-node-lease")
        for value in ({"quota": {"pods": "1"}}, {"create": False, "launchers": ["Group:lab"]})
    ),
    ("kubernetes/lab/namespaces/train/quota", {}, "kubernetes.lab.namespaces.train.quota", "is empty"),
    (
        "kubernetes/lab/namespaces/train/quota",
        {"nvidia.com/gpu": "8"},
        "kubernetes.lab.namespaces.train.quota.nvidia.com/gpu",
        "did you mean `requests.nvidia.com/gpu`?",
    ),
    (
        "kubernetes/lab/namespaces/train/quota",
        {"pods": "many"},
        "kubernetes.lab.namespaces.train.quota.pods",
        "a quantity",
    ),
    *(
        (
            "kubernetes/lab/namespaces/train/quota",
            {key: amount},
            f"kubernetes.lab.namespaces.train.quota.{key}",
            said,
        )
        for key, amount, said in (
            ("pods", "200m", "a whole number"),
            ("pods", "1.5", "a whole number"),
            ("secrets", "0.1", "a whole number"),
            ("requests.nvidia.com/gpu", "500m", "a whole number"),
            ("count/jobs.batch", "1.5", "a whole number"),
            ("pods", "\u0662", "a quantity"),
        )
    ),
    *(
        (
            "kubernetes/lab/namespaces/train/egress_cidrs",
            [cidr, *more],
            f"kubernetes.lab.namespaces.train.egress_cidrs{at}",
            said,
        )
        for cidr, more, at, said in (
            ("169.254.169.254/32", [], "[0]", "credentials"),
            ("fd20:ce::254/128", [], "[0]", "credentials"),
            ("10.0.0.0/8", ["10.0.0.0/8"], "", "2 times"),
        )
    ),
    (
        "kubernetes/lab/namespaces/train/claims/scratch/size",
        "\u0661Gi",
        "kubernetes.lab.namespaces.train.claims.scratch.size",
        "a size such as",
    ),
    (
        "kubernetes/lab/namespaces/train/quota",
        {"requests.storage": "1Gi"},
        "kubernetes.lab.namespaces.train.quota.requests.storage",
        "add up to more",
    ),
    (
        "kubernetes/lab/namespaces/train/claims/scratch/size",
        "1 TB",
        "kubernetes.lab.namespaces.train.claims.scratch.size",
        "a size such as",
    ),
    (
        "kubernetes/lab/namespaces/train/claims/scratch/access_mode",
        "ReadWriteMnay",
        "kubernetes.lab.namespaces.train.claims.scratch.access_mode",
        "ReadWriteOnce, ReadOnlyMany",
    ),
    (
        "kubernetes/lab/namespaces/train/claims/scratch",
        {"size": "1Gi", "existing": True, "existing_volume": "v"},
        "kubernetes.lab.namespaces.train.claims.scratch.existing_volume",
        "leave one of them out",
    ),
    (
        "kubernetes/lab/namespaces/train/launchers",
        ["alice"],
        "kubernetes.lab.namespaces.train.launchers[0]",
        "`User:NAME`",
    ),
    (
        "kubernetes/lab/namespaces/train/launchers",
        ["Group:system:authenticated"],
        "kubernetes.lab.namespaces.train.launchers[0]",
        "no name of Kubernetes' own",
    ),
    (
        "kubernetes/lab/namespaces/train/egress_cidrs",
        ["10.0.0.1/8"],
        "kubernetes.lab.namespaces.train.egress_cidrs[0]",
        "no host bits",
    ),
    (
        "kubernetes/other",
        {"context": "lab", "cluster_identifier": "lab-2", "server": "https://x"},
        "kubernetes.other.context",
        "another cluster of this stack has too",
    ),
    (
        "kubernetes/lab/namespaces/train/quota",
        {"pods": "0"},
        "kubernetes.lab.namespaces.train.quota.pods",
        "at least 1",
    ),
    (
        "kubernetes/lab/namespaces/train/quota",
        {"requests.memory": "64m"},
        "kubernetes.lab.namespaces.train.quota.requests.memory",
        "write `64Mi`",
    ),
    (
        "kubernetes/lab/namespaces/train/claims",
        {"a": {"size": "1Gi", "existing_volume": "v"}, "b": {"size": "1Gi", "existing_volume": "v"}},
        "kubernetes.lab.namespaces.train.claims.a.existing_volume",
        "which another claim has too",
    ),
    (
        "kubernetes/lab/namespaces",
        {key: {"quota": {"pods": "2"}, "claims": {"b": {"size": "1Gi", "existing_volume": "v"}}} for key in ("x", "y")},
        "kubernetes.lab.namespaces.y.claims.b.existing_volume",
        "which another claim has too",
    ),
    (
        "kubernetes/lab/namespaces/train/labels",
        {"pod-security.kubernetes.io/enforce": "privileged"},
        "kubernetes.lab.namespaces.train.labels.pod-security.kubernetes.io/enforce",
        "Kubernetes' own",
    ),
    (
        "kubernetes/lab/namespaces/train/image_pull_secrets",
        ["Login"],
        "kubernetes.lab.namespaces.train.image_pull_secrets[0]",
        "the name of a secret",
    ),
    ("kubernetes/lab/workload_pool", "my-lab", "kubernetes.lab.workload_pool", "`PROJECT.svc.id.goog`"),
    ("queues/default/regions", ["us-west4-a"], "queues.default.regions[0]", "a region such as `us-west4`"),
    # network and alerts
    ("network/nat_addresses", 17, "network.nat_addresses", "allowed are 0 to 16"),
    ("network/ssh_cidrs", ["0.0.0.0/0"], "network.ssh_cidrs[0]", "a private IPv4 range"),
    ("network/ssh_cidrs", ["vpn"], "network.ssh_cidrs[0]", "the length of its prefix"),
    ("alerts/channels", ["#ops"], "alerts.channels[0]", "`projects/P/notificationChannels/ID`"),
    # who signs in
    ("federation", {"hpc": {"issuer": "http://x", "subjects": ["a"]}}, "federation.hpc.issuer", "`https://HOST/PATH`"),
    *(
        ("federation", {"hpc": {"issuer": issuer, "subjects": ["a"]}}, "federation.hpc.jwks", "cannot fetch the keys")
        for issuer in (
            "https://kubernetes.default.svc",
            "https://kubernetes.default.svc.cluster.local",
            "https://k3s:6443",
        )
    ),
    ("federation", {"hpc": {"issuer": "https://x.org", "subjects": []}}, "federation.hpc.subjects", "nobody could"),
    (
        "federation",
        {"hpc": {"issuer": "https://x.org", "subjects": ["a*"]}},
        "federation.hpc.subjects[0]",
        "no pattern",
    ),
    *(
        (
            "federation",
            {"hpc": {"issuer": "https://x.org", "subjects": ["a"], "jwks": keys}},
            "federation.hpc.jwks",
            says,
        )
        for keys, says in (
            ("https://x.org/keys", "is no JSON Web Key Set"),
            ('{"keys": "a"}', "is no JSON Web Key Set"),
            ('{"keys": []}', "has no key"),
            ('{"keys": [{"kty": "RSA", "n": "1", "e": "AQAB", "d": "2"}]}', "has a private key"),
        )
    ),
    ("heads/main/setup", "if true; then\n  echo\n", "heads.main.setup", "syntax error"),
    # buckets
    ("buckets", {"data": {}}, "buckets.data", "neither `readers` nor `writers`"),
    ("buckets", {"data": {"writers": ["worker"]}}, "buckets.data.writers[0]", "did you mean `workers`?"),
    ("buckets", {"data": {"writers": ["researchers"]}}, "buckets.data.writers[0]", "`access.researchers` is not set"),
    ("buckets", {"data": {"writers": ["user:me"]}}, "buckets.data.writers[0]", "`user:EMAIL`"),
    ("buckets", {"data": WRITTEN | {"readers": ["workers"]}}, "buckets.data.readers", "writers read, too"),
    ("buckets", {"data": WRITTEN | {"existing": "gs://lake"}}, "buckets.data.existing", "without `gs://`"),
    ("buckets", {"data": WRITTEN | {"existing": "lake", "bucket": "b-1"}}, "buckets.data.bucket", "beside `existing`"),
    ("buckets", {"data": WRITTEN | {"location": "mars"}}, "buckets.data.location", "a region such as"),
    ("buckets", {"data": WRITTEN | {"soft_delete_days": 3}}, "buckets.data.soft_delete_days", "0, or 7 to 90"),
    ("buckets", {"data": WRITTEN | {"delete_after_days": {"": 1}}}, "buckets.data.delete_after_days.", "ends in `/`"),
    (
        "buckets",
        {"data": WRITTEN | {"delete_after_days": {"runs/": 7, "runs/keep/": 365}}},
        "buckets.data.delete_after_days.runs/keep/",
        "all of `runs/` is deleted after 7",
    ),
    ("buckets", {"records": WRITTEN}, "buckets.records", "the task records' bucket"),
    ("buckets", {"d": WRITTEN | {"existing": "my-lab-west-records"}}, "buckets.d", "the task records' bucket"),
    ("buckets", {"d": WRITTEN | {"existing": "my-lab-pulumi-state"}}, "buckets.d", "does not hold Pulumi's state"),
    ("records/bucket", "my-lab-pulumi-state", "records", "does not hold Pulumi's state"),
    # people, pipelines, alerts
    ("access/operators", ["ops@example.com"], "access.operators[0]", "did you mean `group:ops@example.com`?"),
    ("access/operators", ["allUsers"], "access.operators[0]", "which is everybody"),
    ("access/operators", ["group:not an address"], "access.operators[0]", "`group:EMAIL`"),
    ("access", {"project_grants": False}, "access.project_grants", "name `operators` or `researchers`"),
    ("access/project_grants", "none", "access.project_grants", "true or false"),
    ("ci/repositories", {}, "ci.repositories", "nothing could deploy"),
    ("ci/repositories/runtime", {"repository_id": 1, "owner_id": 2}, "ci.repositories.runtime", "`owner/name`"),
    (f"{REPOSITORY}/repository_id", 0, "ci.repositories.lab/runtime.repository_id", "a positive number"),
    ("ci/deploys", ["head"], "ci.deploys[0]", "did you mean `heads`?"),
    ("ci/state_bucket", "gs://lab-state", "ci.state_bucket", "without `gs://`"),
    ("ci/state_key", "state", "ci.state_key", "a key, `projects/P/"),
    ("ci/billing_account", "mine", "ci.billing_account", "in hex digits"),
    ("ci/queues", {"default": {}}, "ci.queues", "is no key here"),
    ("ci", PIPELINE["ci"], "queues", "could change its own rights"),
    ("deployer", "me@example.com", "deployer", "a service account"),
    *(
        (f"{REPOSITORY}/ref", ref, "ci.repositories.lab/runtime.ref", "`refs/heads/BRANCH`")
        for ref in ("refs/heads/*", "refs/heads/?", "refs/pull/1/merge")
    ),
    (f"{REPOSITORY}/ref", "refs/heads/it's", "ci.repositories.lab/runtime.ref", "`refs/heads/BRANCH`"),
    *(
        (
            "kubernetes/lab/namespaces/train/launchers",
            [who],
            "kubernetes.lab.namespaces.train.launchers[0]",
            "`system:`",
        )
        for who in ("Group:system:masters", "Group:system:authenticated", "User:system:admin", "User:system:anonymous")
    ),
    ("access/operators", ["domain:gmail.com"], "access.operators[0]", "which is everybody"),
    ("access/operators", ["domain:GMail.com"], "access.operators[0]", "which is everybody"),
    (f"{REPOSITORY}/ref", "main", "ci.repositories.lab/runtime.ref", "did you mean `refs/heads/main`?"),
    ("alerts/emails", [], "alerts.emails", "reach nobody"),
    ("alerts/emails", ["ops"], "alerts.emails[0]", "an e-mail address"),
    ("alerts/oldest_task_days", 31, "alerts.oldest_task_days", "allowed are 1 to 30"),
    ("queues/default/retention_s", 86_400, "alerts.oldest_task_days", "less than the retention of queue `default`"),
    ("alerts/budget", {"billing_account": "mine", "monthly": 5}, "alerts.budget.billing_account", "is `mine`"),
    (
        "alerts/budget",
        {"billing_account": "0123AB-0123AB-0123AB", "monthly": 0},
        "alerts.budget.monthly",
        "allowed are 1 to",
    ),
    *(
        (f"{REPOSITORY}/ref", ref, "ci.repositories.lab/runtime.ref", "`refs/heads/BRANCH`")
        for ref in (
            *("refs/heads/main/", "refs/heads//main", "refs/heads/a..b", "refs/heads/a.lock", "refs/heads/a.lock/b"),
            *("refs/heads/.a", "refs/heads/a.", "refs/heads/a@{1}", "refs/heads/a\x01", "refs/heads/a\x7f"),
            "refs/heads",
        )
    ),
    ("access/operators", ["user:Ada@example.com"], "access.operators[0]", "write `user:ada@example.com`"),
    ("access/researchers", ["group:lab@Example.com"], "access.researchers[0]", "write `group:lab@example.com`"),
    ("access/researchers", ["domain:Example.com"], "access.researchers[0]", "write `domain:example.com`"),
    ("access/operators", ["user:w@my-lab.iam.gserviceaccount.com"], "access.operators[0]", "write `serviceAccount:w@"),
    ("access/workers", ["group:lab@example.com"], "access.workers[0]", "is no program"),
    ("access/workers", ["principal://x"], "access.workers[0]", "`principalSet://…/group/…`"),
    ("access/workers", [f"principalSet://{OTHERS}/*"], "access.workers[0]", "every identity of the pool"),
    ("access/workers", [f"principal://{OTHERS}/*"], "access.workers[0]", "`principal://…/subject/…`"),
    ("access/researchers", ["group:ops@example.com"], "access.researchers[0]", "which `operators` has too"),
    *(
        ("access/operators", [f"group:{local}@example.com"], "access.operators[0]", "`group:EMAIL`")
        for local in ("*", 'a"b', "a\u202eb", "", "\u0430da", "a`b")
    ),
    # overrides
    ("overrides/images", ["ghcr.io/lab/"], "overrides.images[0]", "`HOST/PATH`"),
    ("overrides/images", ["ghcr.io"], "overrides.images[0]", "`HOST/PATH`"),
    ("overrides/boot_image_projects", ["*"], "overrides.boot_image_projects[0]", "a project's id"),
]


MEMBERS = [
    "serviceAccount:123456789012-compute@developer.gserviceaccount.com",
    "serviceAccount:my-lab@appspot.gserviceaccount.com",
    "serviceAccount:my-lab.svc.id.goog[train/runtime-job]",
    f"principal://{OTHERS}/subject/system:serviceaccount:train:default",
    f"principalSet://{OTHERS}/attribute.repository_owner/lab",
    "principalSet://iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/my-lab.svc.id.goog/namespace/train",
    "principal://iam.googleapis.com/locations/global/workforcePools/lab/subject/ada@example.com",
    "principalSet://iam.googleapis.com/locations/global/workforcePools/lab/group/operators",
]


@pytest.mark.parametrize("member", MEMBERS)
def test_every_principal_of_google_is_taken(member: str) -> None:
    for path in ("access/operators", "access/workers"):
        parsed = parse_settings("west", changed(path, [member]))
        assert member in (*parsed.access.operators, *parsed.access.workers)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"impersonate": "run-up@my-lab.iam.gserviceaccount.com"}, "impersonate"),
        ({"federation": {"hpc": {"issuer": "https://x.org", "subjects": ["a"]}}}, "federation"),
        ({"kubernetes": GOOD["kubernetes"]}, "kubernetes"),
        ({"access": {"operators": ["group:ops@example.com"], "project_grants": True}}, "access.project_grants"),
        ({"access": {"workers": [f"serviceAccount:{PIPELINES}"]}}, "access.workers"),
        ({"buckets": {"data": {"writers": [f"serviceAccount:{PIPELINES}"]}}}, "buckets.data.writers"),
    ],
)
def test_stack_of_a_pipeline_leaves_its_rights_to_people(change: dict[str, Any], path: str) -> None:
    values = {key: value for key, value in GOOD.items() if key != "kubernetes"} | {"deployer": PIPELINES}

    assert parse_settings("west", values).deployer == PIPELINES
    assert [problem.path for problem in problems_of(values | change)] == [path]


@pytest.mark.parametrize(("change", "value", "path", "says"), WRONG, ids=[f"{p}={v!r}"[:60] for p, v, _, _ in WRONG])
def test_one_wrong_setting_is_named_with_its_value_and_what_is_allowed(
    change: str, value: Any, path: str, says: str
) -> None:
    found = {problem.path: str(problem) for problem in problems_of(changed(change, value))}

    assert path in found, found
    assert says in found[path]


# Each mistake gives one line, unless it makes other values wrong: references to it, or a second rule for the value.
SEVERAL = {
    "kubernetes/lab/namespaces",
    "kubernetes/lab/namespaces/train/claims",
    "kubernetes/lab/namespaces/default",
    "kubernetes/other",
    "network",
    "project",
    "queues",
    "region",
    "registries/images/regions",
    "registries/images/repository",
    "secrets/hf-token/env",
    "secrets/other",
    "zone",
    "ci",
    "deployer",
    f"{REPOSITORY}/repository_id",
}


@pytest.mark.parametrize(("change", "value"), [(p, v) for p, v, _, _ in WRONG if p not in SEVERAL])
def test_one_wrong_setting_is_one_line(change: str, value: Any) -> None:
    assert len(problems_of(changed(change, value))) == 1


def test_several_wrong_settings_are_all_told_at_once() -> None:
    found = problems_of(
        {
            "regoin": "us-west4",
            "protect": "maybe",
            "queues": {"a": {"ack_deadline_s": 5}},
            "heads": {"main": {"image": "x:latest", "pools": {"p": POOL | {"accelerator": "v5e-1", "max": 2}}}},
            "access": {"operators": ["me"]},
        }
    )

    assert [problem.path for problem in found] == [
        "regoin",
        "protect",
        "queues.a.ack_deadline_s",
        "heads.main.image",
        "heads.main.pools.p.accelerator",
        "heads.main.pools.p.min",
        "access.operators[0]",
        "project",
        "region",
        "zone",
        "network",
    ]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ("labels/token", "labels.token"),
        ("secrets/hf-token/value", "secrets.hf-token.value"),
        ("heads/main/environment", "heads.main.environment"),
        ("access/operators", "access.operators"),
        ("nonsense", "nonsense"),
    ],
)
def test_typed_secret_is_named_by_its_place_and_never_repeated(change: str, path: str) -> None:
    secret = "hf_" + 30 * "x"

    for value in (secret, [secret]):
        [problem] = problems_of(changed(change, value))
        assert problem.path in (path, f"{path}[0]")
        assert "`runtime secrets put`" in str(problem)
        assert secret not in str(problem)


def test_part_that_cannot_be_read_is_the_only_news() -> None:
    [problem] = problems_of(changed("queues", ["default"]))

    assert str(problem) == "`queues` is a list, allowed is an object with keys; write `{default: {}}`"


def test_part_that_cannot_be_read_hides_nothing_that_is_wrong_in_another() -> None:
    values = changed("queues", ["default"])
    values["heads"]["main"]["disk_gb"] = 1

    assert find_paths(values) == ["queues", "heads.main.disk_gb"]


def test_invalid_settings_render_a_line_per_problem_and_where_to_read_on() -> None:
    problems = [
        Problem("zone", "is not set", "set it"),
        Problem("heads.a.disk_gb", "is 1"),
    ]

    assert InvalidSettings("stack `west`", problems).render() == (
        "error: the settings of stack `west` cannot be used\n"
        "  `zone` is not set; set it\n"
        "  `heads.a.disk_gb` is 1\n"
        "hint: docs/settings.md has every key and what is allowed"
    )


def test_pools_whose_maxima_do_not_fit_the_subnet_are_refused_with_the_size_that_does() -> None:
    pools = {name: POOL | {"max": 1024} for name in ("a", "b")}
    values = changed("heads/main/pools", pools) | {"network": {"cidr": "10.64.0.0/21"}}

    assert problems_of(values) == (
        Problem(
            "network.cidr",
            "is `10.64.0.0/21` with room for 2,044 machines, and the pools' maxima with the heads are 2,049",
            "a /20 would do",
        ),
    )


@settings(max_examples=40)
@given(nodes=st.integers(0, 1024), others=st.integers(0, 1024))
def test_pools_fit_the_subnet_exactly_when_there_are_addresses_for_all(nodes: int, others: int) -> None:
    pools = {"a": POOL | {"min": 0, "max": nodes}, "b": POOL | {"min": 0, "max": others}}
    values = changed("heads/main/pools", pools) | {"network": {"cidr": "10.64.0.0/21"}}

    fits = nodes + others + 1 <= 2048 - 4

    assert find_paths(values) == ([] if fits else ["network.cidr"])


@pytest.mark.parametrize(("cidr", "fits"), [("10.64.0.0/29", False), ("10.64.0.0/28", True)])
def test_subnet_may_be_as_small_as_all_hosts_of_its_slices_need(cidr: str, fits: bool) -> None:
    slices = {"accelerator": "v4-16", "runtime_version": "tpu-ubuntu2204-base", "min": 0, "max": 4}
    values = changed("heads/main/pools", {"v4": slices}) | {"network": {"cidr": cidr}}

    assert find_paths(values) == ([] if fits else ["network.cidr"])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("registries/images/regions", ["us-west4", "us-north9"]),
        ("heads/main/pools/v5e", {"accelerator": "v6e-4", "runtime_version": "v2-alpha-tpuv6e"}),
        ("heads/main/pools/v5e", {"accelerator": "tpu7x-8", "runtime_version": "v2-alpha-tpu7x"}),
        ("heads/main/pools/v5e", {"accelerator": "v9x-8", "runtime_version": "tpu-ubuntu2604", "cpus": 50}),
        ("heads/main/machine_type", "n2-standard-160"),
        ("heads/main/machine_type", "c9-standard-8"),
    ],
)
def test_what_google_may_have_and_the_facts_here_lack_is_accepted(path: str, value: object) -> None:
    assert find_paths(changed(path, value)) == []


def test_namespace_with_fractions_of_what_is_measured_and_a_volume_that_exists_is_accepted() -> None:
    namespace = {
        "quota": {"requests.cpu": "500m", "limits.memory": "1.5Gi", "requests.storage": "1.5Ti", "pods": "2k"},
        "claims": {"scratch": {"size": "1Ti", "existing_volume": "v"}, "shared": {"size": "1Gi", "existing": True}},
    }

    assert find_paths(changed("kubernetes/lab/namespaces/train", namespace)) == []
    assert (
        find_paths(
            changed(
                "kubernetes/lab/namespaces/train",
                {"quota": {"a.storageclass.storage.k8s.io/requests.storage": "1.5Gi"}},
            )
        )
        == []
    )


def test_slots_in_a_namespace_that_is_none_of_the_clusters_are_refused_with_those_there_are() -> None:
    [problem] = problems_of(changed("kubernetes/lab/slot_namespace", "trian"))

    assert "one of the cluster's namespaces: train" in problem.message


@pytest.mark.parametrize(
    "text",
    ['{"default": {"ack_deadline_s": 10, "ack_deadline_s": 20}}', '{"a": {}, "a": {}}', "[" * 200_000, "{"],
    ids=["repeated-key", "repeated-name", "deep", "cut"],
)
def test_object_as_text_that_is_no_object_is_refused_and_not_guessed(text: str) -> None:
    [problem] = problems_of(GOOD | {"queues": text})

    assert (problem.path, "allowed is an object with keys" in problem.message) == ("queues", True)
    assert problem.hint is None


@pytest.mark.parametrize(
    ("image", "images"),
    [
        (f"docker.io/rayproject/ray@{DIGEST}", []),
        (f"rayproject/ray@{DIGEST}", []),
        (f"ghcr.io/lab/c@{DIGEST}", ["ghcr.io/lab"]),
        (f"ghcr.io/lab/c@{DIGEST}", ["ghcr.io/lab/c"]),
    ],
)
def test_image_of_ray_or_of_a_source_that_the_stack_file_names_is_accepted(image: str, images: list[str]) -> None:
    values = changed("heads/main/image", image) | {"overrides": {"images": images}}

    assert parse_settings("west", values).heads["main"].image == image


@pytest.mark.parametrize(
    ("image", "projects"),
    [
        ("projects/my-lab/global/images/own-7", []),
        ("projects/cos-cloud/global/images/cos-113-18244-85-29", []),
        ("projects/lab-images/global/images/own-7", ["lab-images"]),
    ],
)
def test_boot_image_of_a_known_or_named_project_is_accepted(image: str, projects: list[str]) -> None:
    values = changed("heads/main/boot_image", image) | {"overrides": {"boot_image_projects": projects}}

    assert parse_settings("west", values).heads["main"].boot_image == image


@pytest.mark.parametrize(
    ("subnet", "host"),
    [
        ("projects/host/regions/us-west4/subnetworks/s", "host"),
        ("https://www.googleapis.com/compute/v1/projects/host/regions/us-west4/subnetworks/s", "host"),
        ("projects/my-lab/regions/us-west4/subnetworks/s", None),
        (None, None),
    ],
)
def test_host_project_is_that_of_a_subnet_of_another_project(subnet: str | None, host: str | None) -> None:
    network = {"cidr": "10.64.0.0/20"} | ({"subnet": subnet} if subnet else {})

    assert parse_settings("west", GOOD | {"network": network}).host_project == host


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"min": 0, "max": 0, "buffer": 1}, "is 1, allowed is 0 to `max`, 0"),
        ({"min": 2, "max": 2, "buffer": 1}, "is 1, and all nodes of the pool exist at all times: `min` is `max`, 2"),
    ],
)
def test_buffer_without_an_effect_is_refused(bounds: dict[str, int], message: str) -> None:
    pool = {**GOOD["heads"]["main"]["pools"]["v5e"], **bounds}

    problems = problems_of(changed("heads/main/pools/v5e", pool))

    assert [(each.path, each.message) for each in problems] == [("heads.main.pools.v5e.buffer", message)]


@pytest.mark.parametrize("bounds", [(0, 2, 2), (2, 3, 3), (2, 2, 0)], ids=str)
def test_buffer_within_the_maximum_is_taken_beside_any_minimum(bounds: tuple[int, int, int]) -> None:
    pool = {**GOOD["heads"]["main"]["pools"]["v5e"], **dict(zip(("min", "max", "buffer"), bounds, strict=True))}

    assert find_paths(changed("heads/main/pools/v5e", pool)) == []


@pytest.mark.parametrize("cpus", [1, 24])
def test_cpus_of_a_pool_up_to_all_of_its_hosts_are_accepted(cpus: int) -> None:
    read = parse_settings("west", changed("heads/main/pools/v5e/cpus", cpus))

    assert read.heads["main"].pools["v5e"].cpus == cpus


@pytest.mark.parametrize("capacity", ["preemptible", "spot", "reserved", "on_demand"])
def test_capacity_that_ray_passes_on_is_accepted(capacity: str) -> None:
    read = parse_settings("west", changed("heads/main/pools/v5e/capacity", capacity))

    assert read.heads["main"].pools["v5e"].capacity == TpuCapacity(capacity)


def test_image_digest_of_zeros_is_accepted_because_the_head_waits_for_the_image() -> None:
    assert parse_settings("west", GOOD).heads["main"].image.endswith("0" * 64)


def test_stack_without_google_needs_no_project_and_refuses_what_would_do_nothing() -> None:
    kubernetes = {"kubernetes": GOOD["kubernetes"]}

    assert parse_settings("lab", kubernetes).project is None
    assert [each.path for each in problems_of(kubernetes | {"access": GOOD["access"], "alerts": GOOD["alerts"]})] == [
        "access",
        "alerts",
    ]


def test_key_of_another_namespace_is_refused_with_the_key_of_ours() -> None:
    config = CLOSED_DOOR | {
        "gcp:project": "ambient",
        "kubernetes:context": "lab",
        "reserch-runtime:queues": "{}",
        "research-runtime:kubernetes": json.dumps(GOOD["kubernetes"]),
    }

    with pytest.raises(InvalidSettings) as invalid:
        settings_from("lab", config)

    assert [(each.path, each.hint) for each in invalid.value.problems] == [
        ("gcp:project", "`research-runtime:project` is where the project is set"),
        ("kubernetes:context", "`research-runtime:kubernetes` names each cluster's context"),
        ("reserch-runtime:queues", "did you mean `research-runtime`?"),
    ]


def test_stack_that_leaves_default_providers_on_is_refused() -> None:
    with pytest.raises(InvalidSettings) as invalid:
        settings_from("lab", {"research-runtime:kubernetes": json.dumps(GOOD["kubernetes"])})

    assert [each.path for each in invalid.value.problems] == ["pulumi:disable-default-providers"]


def test_encrypted_setting_is_refused_and_its_value_not_told() -> None:
    config = CLOSED_DOOR | {
        "research-runtime:kubernetes": json.dumps(GOOD["kubernetes"]),
        "research-runtime:labels": '{"team": "hunter2"}',
    }

    with pytest.raises(InvalidSettings) as invalid:
        settings_from("lab", config, secrets=["research-runtime:labels"])

    assert [each.path for each in invalid.value.problems] == ["research-runtime:labels"]
    assert "hunter2" not in invalid.value.render()


def test_settings_of_the_running_stack_are_read_with_misspelt_keys_in_view() -> None:
    from infra.settings.read import read_settings

    good = {f"research-runtime:{key}": v if isinstance(v, str) else json.dumps(v) for key, v in GOOD.items()}
    seen: list[StackSettings] = []

    record(lambda: seen.append(read_settings()), stack="west", config=good | CLOSED_DOOR)
    with pytest.raises(InvalidSettings) as invalid:
        record(
            lambda: seen.append(read_settings()),
            stack="west",
            config=good | CLOSED_DOOR | {"research-runtime:quues": "{}"},
        )

    assert seen == [parse_settings("west", GOOD)]
    assert [each.path for each in invalid.value.problems] == ["quues"]


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        (QueueSettings(), []),
        (QueueSettings(ack_deadline_s=5), ["queues.a.ack_deadline_s"]),
        (QueueSettings(ack_deadline_s="60"), ["queues.a.ack_deadline_s"]),  # type: ignore[arg-type]
        (NetworkSettings(cidr="10.0.0.0/30"), ["queues.a.cidr"]),
        (RecordsSettings(soft_delete_days=1, logs_days=0), ["queues.a.soft_delete_days", "queues.a.logs_days"]),
        (AlertSettings(emails=("x",)), ["queues.a.emails[0]"]),
        (AlertSettings(emails="ops@example.com"), ["queues.a.emails"]),  # type: ignore[arg-type]
        (
            HeadSettings(
                image=IMAGE, pools={"p": TpuPoolSettings(accelerator="v4-16", runtime_version="tpu-vm-v4-base")}
            ),
            ["queues.a.pools.p.min"],
        ),
        (HeadSettings(image=IMAGE, pools={"p": 5}), ["queues.a.pools.p"]),  # type: ignore[dict-item]
    ],
)
def test_value_built_by_another_program_is_judged_like_a_stack_file(value: object, paths: list[str]) -> None:
    assert [problem.path for problem in find_problems(value, "queues.a")] == paths


def test_ensure_valid_names_the_place() -> None:
    ensure_valid(QueueSettings(), "queues.a")
    with pytest.raises(InvalidSettings) as invalid:
        ensure_valid(QueueSettings(max_delivery_attempts=1), "queues.a")

    assert (invalid.value.where, [each.path for each in invalid.value.problems]) == (
        "`queues.a`",
        ["queues.a.max_delivery_attempts"],
    )


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=200)
@given(path=st.sampled_from(sorted({path for path, *_ in WRONG})), value=junk)
def test_any_value_anywhere_is_read_or_refused_and_never_a_traceback(path: str, value: Any) -> None:
    values: dict[str, Any] = json.loads(json.dumps(GOOD))
    *parents, last = path.split("/")
    place = values
    for key in parents:
        place = place.setdefault(key, {})
    place[last] = value

    assert all(find_paths(values))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("64", 64),
        ("500m", 0.5),
        ("1k", 1000),
        ("1Ki", 1024),
        ("20Gi", 20 * 2**30),
        ("1.5T", 1.5e12),
        ("2E", 2e18),
        ("2Ei", 2 * 2**60),
        ("many", 0),
    ],
)
def test_quantity_is_read_as_kubernetes_does(text: str, number: float) -> None:
    assert quantity(text) == number
