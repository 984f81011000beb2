"""Records, registries and secrets: resources that are created, kept, adopted or referred to, and their grants."""

from __future__ import annotations

import inspect

import pulumi
import pytest

from infra.check.recording import Recording
from infra.components.bucket import Bucket, BucketArgs
from infra.components.records import CONTRACT, LOGS, NOTES, REWRITTEN, Records, RecordsArgs
from infra.components.registry import Registry, RegistryArgs
from infra.components.secret import Secret, SecretArgs
from infra.policy.base import StackBounds
from infra.policy.rules import apply_rules
from infra.settings.model import BucketSettings, RecordsSettings, RegistrySettings, Role, SecretSettings
from runtime.records import layout
from tests.infra.components_support import (
    LABELS,
    assert_sound,
    assert_waits_for,
    customs,
    find_grants,
    make_apis,
    run,
    sample_site,
)

RECORDS = "runtime:records:Records"
REGISTRY = "runtime:registry:Registry"
SECRET = "runtime:secret:Secret"
BUCKET = "gcp:storage/bucket:Bucket"
REPOSITORY = "gcp:artifactregistry/repository:Repository"
CONTAINER = "gcp:secretmanager/secret:Secret"

WORKER = "serviceAccount:w@x.iam.gserviceaccount.com"
PUSHER = "serviceAccount:p@x.iam.gserviceaccount.com"
LAB = "group:lab@example.org"


def record_records(*, preview: bool = True, **args: object) -> Recording:
    def program(opts: pulumi.ResourceOptions) -> None:
        own: dict[str, object] = {"site": sample_site(), "apis": make_apis(opts)}
        Records("records", RecordsArgs(**(own | args)), opts)  # type: ignore[arg-type]

    return run(program, preview=preview)


def record_registry(*, preview: bool = True, **args: object) -> Recording:
    def program(opts: pulumi.ResourceOptions) -> None:
        own: dict[str, object] = {"site": sample_site(), "registry": "images", "apis": make_apis(opts)}
        Registry("images-registry", RegistryArgs(**(own | args)), opts)  # type: ignore[arg-type]

    return run(program, preview=preview)


def record_secret(*, preview: bool = True, **args: object) -> Recording:
    def program(opts: pulumi.ResourceOptions) -> None:
        own: dict[str, object] = {
            "site": sample_site(),
            "secret": "hf-token",
            "settings": SecretSettings(env="HF_TOKEN", readers=(Role.WORKER,)),
            "apis": make_apis(opts),
        }
        Secret("hf-token-secret", SecretArgs(**(own | args)), opts)  # type: ignore[arg-type]

    return run(program, preview=preview)


@pytest.mark.parametrize("preview", [True, False])
def test_records_of_the_defaults_is_a_closed_versioned_bucket_that_stays(preview: bool) -> None:
    recording = record_records(preview=preview)

    (bucket,) = recording.of_type(BUCKET)
    assert bucket.inputs == {
        "name": "lab-1234-marin-records",
        "project": "lab-1234",
        "location": "US-WEST4",
        "storageClass": "STANDARD",
        "labels": LABELS,
        "uniformBucketLevelAccess": True,
        "publicAccessPrevention": "enforced",
        "versioning": {"enabled": True},
        "softDeletePolicy": {"retentionDurationSeconds": 604_800},
        "lifecycleRules": [
            {"action": {"type": "Delete"}, "condition": {"age": 90, "matchesPrefixes": ["logs/"]}},
            {"action": {"type": "Delete"}, "condition": {"age": 30, "matchesPrefixes": ["attempts/"]}},
            {
                "action": {"type": "Delete"},
                "condition": {
                    "daysSinceNoncurrentTime": 1,
                    "withState": "ARCHIVED",
                    "matchesPrefixes": ["workers/", "counters/"],
                },
            },
            {"action": {"type": "Delete"}, "condition": {"daysSinceNoncurrentTime": 30, "withState": "ARCHIVED"}},
            {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}},
        ],
        "forceDestroy": False,
        "deletionPolicy": "ABANDON",
    }
    assert (bucket.protect, bucket.retain_on_delete, bucket.import_id) == (True, True, None)
    assert recording.named(RECORDS, "records").outputs == {
        "bucket": "lab-1234-marin-records",
        "location": "us-west4",
        "url": "gs://lab-1234-marin-records",
    }
    assert_sound(recording, RECORDS)
    assert_waits_for(recording, RECORDS, "storage")


def test_subclass_of_a_program_declares_attributes_of_its_own() -> None:
    class Named(Records):
        title: str

        def __init__(self, name: str, args: RecordsArgs, opts: pulumi.ResourceOptions) -> None:
            super().__init__(name, args, opts)
            self.title = name

    def program(opts: pulumi.ResourceOptions) -> None:
        Named("records", RecordsArgs(site=sample_site(), apis=make_apis(opts)), opts)

    plain, named = record_records(), run(program)

    first, second = (next(each for each in one.resources if each.type == RECORDS) for one in (plain, named))
    assert set(first.outputs) == set(second.outputs) != set()


def test_records_settings_reach_the_bucket() -> None:
    settings = RecordsSettings(location="eu", bucket="lab-own-records", soft_delete_days=0, logs_days=7, notes_days=14)

    (bucket,) = record_records(settings=settings).of_type(BUCKET)

    assert (bucket.inputs["name"], bucket.inputs["location"]) == ("lab-own-records", "EU")
    assert bucket.inputs["softDeletePolicy"] == {"retentionDurationSeconds": 0}
    assert [rule["condition"].get("age") for rule in bucket.inputs["lifecycleRules"]] == [7, 14, None, None, 7]


def test_records_current_objects_age_only_where_logs_and_notes_lie() -> None:
    """Objects under all other names of the layout are kept forever; docs/records.md lists the layout."""
    (bucket,) = record_records().of_type(BUCKET)

    ageing = [
        prefix
        for rule in bucket.inputs["lifecycleRules"]
        if rule["action"]["type"] == "Delete" and rule["condition"].get("withState") != "ARCHIVED"
        for prefix in rule["condition"]["matchesPrefixes"]
    ]
    assert ageing == [LOGS, NOTES]
    for prefix in ("records/", "manifests/", "outputs/", "marks/", "claims/", "experiments/", "values/", "payloads/"):
        assert not any(prefix.startswith(each) or each.startswith(prefix) for each in (*ageing, *REWRITTEN, CONTRACT))


def test_records_lifecycle_prefixes_are_those_that_the_store_writes() -> None:
    source = inspect.getsource(layout)
    for prefix in (LOGS, NOTES, *REWRITTEN):
        assert f'f"{prefix}' in source, prefix


def test_records_grants_are_these_and_no_others() -> None:
    recording = record_records(
        users={"worker": WORKER}, readers={"lab": LAB}, publishers={"deployer": "serviceAccount:d@x.iam"}
    )

    at = "bucket lab-1234-marin-records"
    assert find_grants(recording) == {
        (WORKER, "roles/storage.objectUser", at),
        (WORKER, "roles/storage.objectViewer", at),
        (LAB, "roles/storage.objectViewer", at),
        ("serviceAccount:d@x.iam", "roles/storage.objectUser", at),
    }
    conditions = {
        each.name: each.inputs["condition"]["expression"] for each in recording.resources if "condition" in each.inputs
    }
    contract = 'resource.name.startsWith("projects/_/buckets/lab-1234-marin-records/objects/contract/")'
    assert conditions == {"records-deployer-publisher": contract, "records-worker-user": f"!{contract}"}


def test_records_that_survived_a_destroy_are_imported() -> None:
    (fresh,) = record_records().of_type(BUCKET)
    (bucket,) = record_records(site=sample_site(adopt=True)).of_type(BUCKET)

    assert (fresh.import_id, fresh.ignore_changes) == (None, ())
    # Ignored inputs would stay unset until the next `up`, and show as drift until then.
    assert (bucket.import_id, bucket.ignore_changes) == ("lab-1234-marin-records", ())


@pytest.mark.parametrize("preview", [True, False])
def test_registry_makes_a_repository_in_each_region(preview: bool) -> None:
    settings = RegistrySettings(regions=("us-west4", "europe-west4"))

    recording = record_registry(preview=preview, settings=settings)

    repositories = recording.of_type(REPOSITORY)
    assert [(each.name, each.inputs["location"]) for each in repositories] == [
        ("images-registry-us-west4-repository", "us-west4"),
        ("images-registry-europe-west4-repository", "europe-west4"),
    ]
    assert repositories[0].inputs == {
        "project": "lab-1234",
        "location": "us-west4",
        "repositoryId": "marin-images",
        "description": "Images `images` of stack marin",
        "format": "DOCKER",
        "mode": "STANDARD_REPOSITORY",
        "labels": LABELS,
        "dockerConfig": {"immutableTags": False},
        "cleanupPolicies": [
            {"id": "delete-old", "action": "DELETE", "condition": {"tagState": "ANY", "olderThan": "2592000s"}},
            {"id": "keep-newest", "action": "KEEP", "mostRecentVersions": {"keepCount": 16}},
            {"id": "keep-tagged", "action": "KEEP", "condition": {"tagState": "TAGGED", "tagPrefixes": ["keep-"]}},
        ],
        "cleanupPolicyDryRun": False,
        "vulnerabilityScanningConfig": {"enablementConfig": "INHERITED"},
        "deletionPolicy": "DELETE",
    }
    assert all(each.protect for each in repositories)
    assert recording.named(REGISTRY, "images-registry").outputs == {
        "urls": {
            "us-west4": "us-west4-docker.pkg.dev/lab-1234/marin-images",
            "europe-west4": "europe-west4-docker.pkg.dev/lab-1234/marin-images",
        },
        "repositories": {
            "us-west4": "projects/lab-1234/locations/us-west4/repositories/marin-images",
            "europe-west4": "projects/lab-1234/locations/europe-west4/repositories/marin-images",
        },
        "caches": {},
        "cache_repositories": {},
    }
    assert_sound(recording, REGISTRY)
    assert_waits_for(recording, REGISTRY, "artifactregistry")


def test_registry_without_regions_lies_in_the_region_of_the_stack() -> None:
    (repository,) = record_registry(settings=RegistrySettings(repository="lab-images")).of_type(REPOSITORY)

    assert (repository.inputs["location"], repository.inputs["repositoryId"]) == ("us-west4", "lab-images")


def test_registry_cleanup_settings_reach_the_repository() -> None:
    settings = RegistrySettings(keep_days=7, keep_newest=3, cleanup_dry_run=True)

    (repository,) = record_registry(settings=settings).of_type(REPOSITORY)

    old, newest, _tagged = repository.inputs["cleanupPolicies"]
    assert old["condition"]["olderThan"] == "604800s"
    assert newest["mostRecentVersions"] == {"keepCount": 3}
    assert repository.inputs["cleanupPolicyDryRun"] is True


@pytest.mark.parametrize(
    ("host", "upstream"),
    [
        ("docker.io", {"publicRepository": "DOCKER_HUB"}),
        ("ghcr.io", {"customRepository": {"uri": "https://ghcr.io"}}),
    ],
)
def test_registry_cache_lies_beside_the_images(host: str, upstream: object) -> None:
    recording = record_registry(settings=RegistrySettings(pull_through=host), readers={"lab": LAB})

    cache = recording.named(REPOSITORY, "images-registry-us-west4-cache-repository")
    assert cache.inputs["mode"] == "REMOTE_REPOSITORY"
    assert cache.inputs["repositoryId"] == "marin-images-cache"
    assert cache.inputs["remoteRepositoryConfig"] == {"description": host, "dockerRepository": upstream}
    assert not cache.protect
    reader = "roles/artifactregistry.reader"
    assert find_grants(recording) == {
        (LAB, reader, "repository us-west4/marin-images"),
        (LAB, reader, "repository us-west4/marin-images-cache"),
    }
    assert recording.named(REGISTRY, "images-registry").outputs["caches"] == {
        "us-west4": "us-west4-docker.pkg.dev/lab-1234/marin-images-cache"
    }
    assert_sound(recording, REGISTRY)


def test_registry_grants_are_these_and_no_others() -> None:
    recording = record_registry(readers={"lab": LAB}, guests={"worker": WORKER}, writers={"pusher": PUSHER})

    at = "repository us-west4/marin-images"
    assert find_grants(recording) == {
        (LAB, "roles/artifactregistry.reader", at),
        (WORKER, "roles/artifactregistry.reader", at),
        (PUSHER, "roles/artifactregistry.writer", at),
    }


def test_registry_of_another_stack_is_referred_to_and_lets_only_our_accounts_in() -> None:
    other = "projects/lab-9/locations/us-west4/repositories/owner-images"

    recording = record_registry(
        settings=RegistrySettings(existing={"us-west4": other}, pull_through="docker.io"),
        readers={"lab": LAB},
        guests={"worker": WORKER},
        writers={"pusher": PUSHER},
    )

    assert recording.of_type(REPOSITORY) == []
    (grant,) = customs(recording, REGISTRY)
    assert grant.inputs == {
        "project": "lab-9",
        "location": "us-west4",
        "repository": "owner-images",
        "role": "roles/artifactregistry.reader",
        "member": WORKER,
    }
    assert recording.named(REGISTRY, "images-registry").outputs == {
        "urls": {"us-west4": "us-west4-docker.pkg.dev/lab-9/owner-images"},
        "repositories": {"us-west4": other},
        "caches": {},
        "cache_repositories": {},
    }
    assert_waits_for(recording, REGISTRY, "artifactregistry")


@pytest.mark.parametrize("preview", [True, False])
def test_secret_is_a_container_with_a_grant_for_each_reader_and_never_a_value(preview: bool) -> None:
    recording = record_secret(preview=preview, readers={"worker": WORKER}, keepers={"ops": "group:ops@example.org"})

    (secret,) = recording.of_type(CONTAINER)
    assert secret.inputs == {
        "project": "lab-1234",
        "secretId": "marin-hf-token",
        "labels": LABELS,
        "replication": {"auto": {}},
        "deletionProtection": False,
        "deletionPolicy": "DELETE",
    }
    assert secret.protect
    at = "secretId marin-hf-token"
    assert find_grants(recording) == {
        (WORKER, "roles/secretmanager.secretAccessor", at),
        ("group:ops@example.org", "roles/secretmanager.viewer", at),
        ("group:ops@example.org", "roles/secretmanager.secretVersionManager", at),
    }
    assert not [each for each in recording.resources if "Version" in each.type]
    assert recording.named(SECRET, "hf-token-secret").outputs == {
        "resource": "projects/lab-1234/secrets/marin-hf-token",
        "env": "HF_TOKEN",
    }
    assert_sound(recording, SECRET)
    assert_waits_for(recording, SECRET, "secretmanager")


def test_secret_that_stays_in_regions_says_which() -> None:
    settings = SecretSettings(env="HF_TOKEN", regions=("us-west4", "europe-west4"))

    (secret,) = record_secret(settings=settings).of_type(CONTAINER)

    assert secret.inputs["replication"] == {
        "userManaged": {"replicas": [{"location": "us-west4"}, {"location": "europe-west4"}]}
    }


def test_secret_of_another_stack_gets_our_readers_and_nothing_else() -> None:
    settings = SecretSettings(env="HF_TOKEN", existing="projects/lab-9/secrets/shared-hf-token")

    recording = record_secret(settings=settings, readers={"worker": WORKER}, keepers={"ops": LAB})

    (grant,) = customs(recording, SECRET)
    assert grant.inputs == {
        "project": "lab-9",
        "secretId": "shared-hf-token",
        "role": "roles/secretmanager.secretAccessor",
        "member": WORKER,
    }
    outputs = recording.named(SECRET, "hf-token-secret").outputs
    assert outputs["resource"] == "projects/lab-9/secrets/shared-hf-token"
    assert_waits_for(recording, SECRET, "secretmanager")


def test_stores_twice_in_a_program_clash_nowhere() -> None:
    def program(opts: pulumi.ResourceOptions) -> None:
        for name in ("one", "two"):
            site = sample_site()
            Records(f"{name}-records", RecordsArgs(site=site, users={"w": WORKER}), opts)
            args = RegistryArgs(site=site, registry=name, readers={"w": WORKER}, writers={"p": PUSHER})
            Registry(f"{name}-registry", args, opts)
            settings = SecretSettings(env="TOKEN")
            Secret(f"{name}-secret", SecretArgs(site=site, secret=name, settings=settings, readers={"w": WORKER}), opts)

    recording = run(program)

    assert [len(recording.of_type(each)) for each in (BUCKET, REPOSITORY, CONTAINER)] == [2, 2, 2]


def test_stores_of_an_unprotected_site_may_go_and_the_bucket_still_stays() -> None:
    site = sample_site(protect=False)

    (bucket,) = record_records(site=site).of_type(BUCKET)
    (repository,) = record_registry(site=site).of_type(REPOSITORY)
    (secret,) = record_secret(site=site).of_type(CONTAINER)

    assert [each.protect for each in (bucket, repository, secret)] == [False, False, False]
    assert [each.retain_on_delete for each in (bucket, repository, secret)] == [True, False, False]


# Buckets of data


def record_bucket(**settings: object) -> Recording:
    def program(opts: pulumi.ResourceOptions) -> None:
        args = BucketArgs(
            site=sample_site(),
            bucket="data",
            settings=BucketSettings(**({"writers": ("workers",)} | settings)),  # type: ignore[arg-type]
            readers={"lab": LAB},
            writers={"worker": WORKER},
            apis=make_apis(opts),
        )
        Bucket("data-bucket", args, opts)

    return run(program)


def test_bucket_of_data_is_closed_kept_and_granted_to_those_named_alone() -> None:
    recording = record_bucket(delete_after_days={"tmp/": 14})

    (made,) = recording.of_type(BUCKET)
    assert (made.protect, made.retain_on_delete) == (True, True)
    assert made.inputs["name"] == "lab-1234-marin-data"
    assert made.inputs["publicAccessPrevention"] == "enforced"
    assert made.inputs["lifecycleRules"][0] == {
        "action": {"type": "Delete"},
        "condition": {"age": 14, "matchesPrefixes": ["tmp/"]},
    }
    assert find_grants(recording) == {
        (LAB, "roles/storage.objectViewer", "bucket lab-1234-marin-data"),
        (WORKER, "roles/storage.objectUser", "bucket lab-1234-marin-data"),
    }
    assert apply_rules(recording.resources, StackBounds(members=frozenset({LAB, WORKER}))) == []
    assert recording.named("runtime:bucket:Bucket", "data-bucket").outputs == {
        "bucket": "lab-1234-marin-data",
        "url": "gs://lab-1234-marin-data",
        "location": "us-west4",
    }


def test_bucket_of_another_is_granted_on_and_not_made() -> None:
    recording = record_bucket(existing="lake")

    assert recording.of_type(BUCKET) == []
    assert {on for _member, _role, on in find_grants(recording)} == {"bucket lake"}


def test_component_of_a_data_bucket_grants_nothing_on_the_records_without_their_condition() -> None:
    def program(opts: pulumi.ResourceOptions) -> None:
        Records("records", RecordsArgs(site=sample_site()), opts)
        settings = BucketSettings(existing="lab-1234-marin-records", writers=("workers",))
        Bucket("d", BucketArgs(site=sample_site(), bucket="d", settings=settings, writers={"worker": WORKER}), opts)

    found = apply_rules(run(program).resources, StackBounds(members=frozenset({WORKER})))

    assert "closed-contract" in {each.rule for each in found}
