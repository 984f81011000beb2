"""Resources, grants and protection of APIs, providers, network, accounts, pipeline identity and alerts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pulumi
import pytest

from infra.check.recording import Recording, Registration, record
from infra.components.alerts import Alerts, AlertsArgs, WatchedCluster, WatchedQueue
from infra.components.apis import Apis, ApisArgs
from infra.components.ci_identity import (
    PERMISSIONS,
    PROJECT_ROLES,
    CiIdentity,
    CiIdentityArgs,
    find_permissions,
)
from infra.components.federation import Federation, FederationArgs
from infra.components.identity import Identity, IdentityArgs, member_label
from infra.components.network import Network, NetworkArgs
from infra.components.providers import google_provider, kubernetes_provider
from infra.gcp.outputs import compute
from infra.policy.base import StackBounds
from infra.policy.rules import apply_rules
from infra.settings.model import (
    AccessSettings,
    AlertSettings,
    BudgetSettings,
    CiSettings,
    IssuerSettings,
    KubernetesAccess,
    NetworkSettings,
    QueueSettings,
    RepositorySettings,
    Role,
    StackSettings,
)
from runtime.errors import NotPossible, UnknownName
from tests.infra.components_support import (
    LABELS,
    POOL,
    PROJECT,
    assert_sound,
    assert_waits_for,
    customs,
    depends_on,
    find_grants,
    make_apis,
    run,
    sample_site,
)
from tests.infra.provider_types import find_input_problems

APIS = "runtime:google:Apis"
NETWORK = "runtime:network:Network"
IDENTITY = "runtime:identity:Identity"
CI = "runtime:identity:CiIdentity"
ALERTS = "runtime:monitoring:Alerts"

SERVICE = "gcp:projects/service:Service"
ACCOUNT = "gcp:serviceaccount/account:Account"
PROJECT_GRANT = "gcp:projects/iAMMember:IAMMember"
CUSTOM_ROLE = "gcp:projects/iAMCustomRole:IAMCustomRole"
IDENTITY_POOL = "gcp:iam/workloadIdentityPool:WorkloadIdentityPool"
IDENTITY_PROVIDER = "gcp:iam/workloadIdentityPoolProvider:WorkloadIdentityPoolProvider"
POLICY = "gcp:monitoring/alertPolicy:AlertPolicy"
CHANNEL = "gcp:monitoring/notificationChannel:NotificationChannel"

OPS, LAB = "group:ops@example.org", "group:lab@example.org"
CI_SETTINGS = CiSettings(repositories={"lab/infra": RepositorySettings(repository_id=11, owner_id=22)})


# APIs


@pytest.mark.parametrize("preview", [True, False])
def test_apis_stay_on_when_the_stack_goes(preview: bool) -> None:
    recording = run(lambda opts: make_apis(opts, "pubsub", "serviceusage", "storage"), preview=preview)

    assert {each.name: each.inputs for each in recording.of_type(SERVICE)} == {
        f"apis-{service}": {
            "project": "lab-1234",
            "service": f"{service}.googleapis.com",
            "disableOnDestroy": False,
            "disableDependentServices": False,
            "deletionPolicy": "ABANDON",
        }
        for service in ("pubsub", "serviceusage", "storage")
    }
    assert all(each.retain_on_delete and not each.protect for each in customs(recording, APIS))
    first = recording.named(SERVICE, "apis-serviceusage")
    assert first.dependencies == frozenset()
    assert all(depends_on(recording, each, first.urn) for each in customs(recording, APIS))
    assert_sound(recording, APIS)


def test_apis_agent_waits_for_its_service_and_is_what_others_need() -> None:
    needed: list[list[pulumi.Resource]] = []

    def program(opts: pulumi.ResourceOptions) -> None:
        apis = make_apis(opts, "serviceusage", "pubsub", "storage")
        needed.extend([apis.needs("storage"), apis.needs("pubsub", "storage")])

    recording = run(program)

    agent = recording.named("gcp:projects/serviceIdentity:ServiceIdentity", "apis-pubsub-agent")
    assert recording.named(SERVICE, "apis-pubsub").urn in agent.dependencies
    assert [len(each) for each in needed] == [1, 3]


def test_apis_refuse_an_agent_of_a_service_that_is_not_on() -> None:
    def program(opts: pulumi.ResourceOptions) -> None:
        with pytest.raises(UnknownName) as refused:
            Apis("apis", ApisArgs(project=PROJECT, services=["storage"], agents=["pubsub"]), opts)
        assert (refused.value.name, refused.value.known) == ("pubsub", ["storage"])

    assert customs(run(program), APIS) == []


def test_apis_need_of_a_service_that_was_not_asked_for_names_those_that_were() -> None:
    def program(opts: pulumi.ResourceOptions) -> None:
        with pytest.raises(UnknownName) as refused:
            make_apis(opts, "storage").needs("pubsob")
        assert refused.value.known == ["storage"]

    run(program)


# Providers


def test_google_provider_takes_nothing_from_its_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GOOGLE_PROJECT", "GOOGLE_CLOUD_PROJECT", "GOOGLE_REGION", "GOOGLE_ZONE", "CLOUDSDK_COMPUTE_ZONE"):
        monkeypatch.setenv(variable, "ambient")
    settings = StackSettings(stack="dev", project="lab-1234", region="us-west4", queues={"default": QueueSettings()})

    recording = record(lambda: google_provider(settings), compute=compute)

    (provider,) = recording.of_type("pulumi:providers:gcp")
    assert provider.inputs == {
        "project": "lab-1234",
        "region": "us-west4",
        "addPulumiAttributionLabel": "false",
        "userProjectOverride": "false",
    }


def test_google_provider_impersonates_and_pays_for_budgets_as_the_settings_say() -> None:
    settings = StackSettings(
        stack="dev",
        project="lab-1234",
        region="us-west4",
        zone="us-west4-a",
        impersonate="deployer@lab-1234.iam.gserviceaccount.com",
        alerts=AlertSettings(
            emails=("ops@example.org",), budget=BudgetSettings(billing_account="000000-AAAAAA-111111", monthly=1)
        ),
    )

    recording = record(lambda: google_provider(settings), compute=compute)

    (provider,) = recording.of_type("pulumi:providers:gcp")
    assert provider.inputs == {
        "project": "lab-1234",
        "region": "us-west4",
        "zone": "us-west4-a",
        "impersonateServiceAccount": "deployer@lab-1234.iam.gserviceaccount.com",
        "addPulumiAttributionLabel": "false",
        "userProjectOverride": "true",
        "billingProject": "lab-1234",
    }


def test_google_provider_without_a_project_is_refused_with_the_key_to_set() -> None:
    with pytest.raises(NotPossible) as refused:
        google_provider(StackSettings(stack="dev", region="us-west4"))

    assert "research-runtime:project" in (refused.value.hint or "")


def test_kubernetes_provider_never_holds_a_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/home/someone/.kube/config")
    monkeypatch.setenv("PULUMI_K8S_DELETE_UNREACHABLE", "true")
    settings = KubernetesAccess(context="nautilus", cluster_identifier="nautilus-1", server="https://k8s.example.org")

    recording = record(lambda: kubernetes_provider("nautilus", settings))

    (provider,) = recording.of_type("pulumi:providers:kubernetes")
    assert provider.name == "kubernetes-nautilus"
    assert provider.inputs == {
        "context": "nautilus",
        "clusterIdentifier": "nautilus-1",
        "enableServerSideApply": "true",
        "deleteUnreachable": "false",
        "skipUpdateUnreachable": "false",
        "enableConfigMapMutable": "false",
        "enableSecretMutable": "false",
        "enablePatchForce": "true",
        "upsertExistingObjects": "false",
        "suppressDeprecationWarnings": "false",
        "suppressHelmHookWarnings": "false",
    }


# Network


def record_network(*, preview: bool = True, **args: object) -> Recording:
    def program(opts: pulumi.ResourceOptions) -> None:
        own: dict[str, object] = {"site": sample_site(), "apis": make_apis(opts)}
        Network("network", NetworkArgs(**(own | args)), opts)  # type: ignore[arg-type]

    return run(program, preview=preview)


@pytest.mark.parametrize("preview", [True, False])
def test_network_is_private_with_a_way_out_and_none_in(preview: bool) -> None:
    recording = record_network(preview=preview)

    link = "https://www.googleapis.com/compute/v1/projects/lab-1234/global/networks/marin"
    subnet = "https://www.googleapis.com/compute/v1/projects/lab-1234/regions/us-west4/subnetworks/marin"
    assert {each.name: each.inputs for each in customs(recording, NETWORK)} == {
        "network-network": {
            "name": "marin",
            "project": "lab-1234",
            "description": "Machines of stack marin",
            "autoCreateSubnetworks": False,
            "routingMode": "REGIONAL",
            "deletionPolicy": "DELETE",
        },
        "network-subnet": {
            "name": "marin",
            "project": "lab-1234",
            "region": "us-west4",
            "network": link,
            "ipCidrRange": "10.64.0.0/20",
            "privateIpGoogleAccess": True,
            "stackType": "IPV4_ONLY",
            "deletionPolicy": "DELETE",
        },
        "network-router": {
            "name": "marin",
            "project": "lab-1234",
            "region": "us-west4",
            "network": link,
            "deletionPolicy": "DELETE",
        },
        "network-nat": {
            "name": "marin",
            "project": "lab-1234",
            "region": "us-west4",
            "router": "marin",
            "natIpAllocateOption": "AUTO_ONLY",
            "sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS",
            "subnetworks": [{"name": subnet, "sourceIpRangesToNats": ["ALL_IP_RANGES"]}],
            "enableDynamicPortAllocation": True,
            "enableEndpointIndependentMapping": False,
            "minPortsPerVm": 64,
            "maxPortsPerVm": 8192,
            "logConfig": {"enable": True, "filter": "ERRORS_ONLY"},
            "deletionPolicy": "DELETE",
        },
        "network-internal": {
            "name": "marin-internal",
            "project": "lab-1234",
            "network": link,
            "description": "Machines of the subnet reach each other; nothing else reaches them",
            "direction": "INGRESS",
            "priority": 1000,
            "sourceRanges": ["10.64.0.0/20"],
            "destinationRanges": ["10.64.0.0/20"],
            "allows": [{"protocol": "tcp"}, {"protocol": "udp"}, {"protocol": "icmp"}],
            "deletionPolicy": "DELETE",
        },
    }
    assert {each.name for each in customs(recording, NETWORK) if each.protect} == {"network-network", "network-subnet"}
    assert recording.named(NETWORK, "network").outputs == {"network": link, "subnet": subnet, "cidr": "10.64.0.0/20"}
    assert_sound(recording, NETWORK)
    assert_waits_for(recording, NETWORK, "compute")


@pytest.mark.parametrize(
    ("named", "network"),
    [
        (None, "projects/lab-9/global/networks/shared"),
        ("projects/lab-9/global/networks/backbone", "projects/lab-9/global/networks/backbone"),
    ],
)
def test_network_that_exists_is_used_and_not_touched(named: str | None, network: str) -> None:
    subnet = "projects/lab-9/regions/us-west4/subnetworks/shared"

    recording = record_network(settings=NetworkSettings(subnet=subnet, network=named, cidr="10.8.0.0/16"))

    assert customs(recording, NETWORK) == []
    assert recording.named(NETWORK, "network").outputs == {
        "network": network,
        "subnet": subnet,
        "cidr": "10.8.0.0/16",
    }


def test_network_logs_its_connections_only_if_asked() -> None:
    def subnet(recording: Recording) -> Registration:
        return recording.named("gcp:compute/subnetwork:Subnetwork", "network-subnet")

    silent, logged = record_network(), record_network(settings=NetworkSettings(flow_logs=True))

    assert "logConfig" not in subnet(silent).inputs
    assert subnet(logged).inputs["logConfig"] == {
        "aggregationInterval": "INTERVAL_1_MIN",
        "flowSampling": 0.5,
        "metadata": "INCLUDE_ALL_METADATA",
    }
    assert find_input_problems("gcp:compute/subnetwork:Subnetwork", subnet(logged).inputs) == []


# Accounts and people


def record_identity(*, preview: bool = True, **args: object) -> Recording:
    def program(opts: pulumi.ResourceOptions) -> None:
        own: dict[str, object] = {
            "site": sample_site(),
            "roles": [Role.WORKER, Role.SUBMITTER],
            "apis": make_apis(opts),
        }
        Identity("identity", IdentityArgs(**(own | args)), opts)  # type: ignore[arg-type]

    return run(program, preview=preview)


@pytest.mark.parametrize("preview", [True, False])
def test_identity_has_one_protected_account_for_each_role(preview: bool) -> None:
    recording = record_identity(preview=preview, roles=[Role.WORKER, Role.SUBMITTER, Role.PUSHER, Role.REAPER])

    accounts = recording.of_type(ACCOUNT)
    assert {each.name: each.inputs["accountId"] for each in accounts} == {
        "identity-worker-account": "marin-worker",
        "identity-submitter-account": "marin-submitter",
        "identity-pusher-account": "marin-pusher",
        "identity-reaper-account": "marin-reaper",
    }
    assert all(each.protect and each.delete_before_replace for each in accounts)
    emails = {
        role: f"marin-{role}@lab-1234.iam.gserviceaccount.com" for role in ("worker", "submitter", "pusher", "reaper")
    }
    assert recording.named(IDENTITY, "identity").outputs == {
        "emails": emails,
        "members": {role: f"serviceAccount:{email}" for role, email in emails.items()},
    }
    assert find_grants(recording) == {
        (f"serviceAccount:{emails[role]}", granted, "project lab-1234")
        for role in ("worker", "reaper")
        for granted in ("roles/logging.logWriter", "roles/monitoring.metricWriter")
    }
    assert_sound(recording, IDENTITY)
    assert_waits_for(recording, IDENTITY, "serviceusage")
    for each in recording.of_type(PROJECT_GRANT):
        assert depends_on(recording, each, recording.named(SERVICE, "apis-cloudresourcemanager").urn)


def test_identity_lets_people_see_and_where_there_are_heads_log_in() -> None:
    access = AccessSettings(operators=(OPS,), researchers=(LAB,))

    watching = record_identity(roles=[], access=access)
    entering = record_identity(roles=[], access=access, has_heads=True)

    seeing = {
        (member, role, "project lab-1234")
        for member in (OPS, LAB)
        for role in ("roles/monitoring.viewer", "roles/logging.viewer")
    }
    assert find_grants(watching) == seeing
    assert find_grants(entering) == seeing | {
        (OPS, "roles/iap.tunnelResourceAccessor", "project lab-1234"),
        (OPS, "roles/compute.osAdminLogin", "project lab-1234"),
        (LAB, "roles/iap.tunnelResourceAccessor", "project lab-1234"),
        (LAB, "roles/compute.osLogin", "project lab-1234"),
    }
    tunnels = [each for each in entering.of_type(PROJECT_GRANT) if "tunnel" in each.inputs["role"]]
    assert [each.inputs["condition"]["expression"] for each in tunnels] == ["destination.port == 22"] * 2


def test_identity_that_leaves_projects_grants_to_another_stack_makes_none_for_people() -> None:
    access = AccessSettings(operators=(OPS,), researchers=(LAB,))

    recording = record_identity(roles=[Role.WORKER], access=access, project_grants=False, has_heads=True)

    assert {member for member, _role, _on in find_grants(recording)} == {
        "serviceAccount:marin-worker@lab-1234.iam.gserviceaccount.com"
    }


def test_identity_of_one_who_changes_lists_keeps_what_both_may_do() -> None:
    before = record_identity(roles=[], access=AccessSettings(researchers=(LAB,)), has_heads=True)
    after = record_identity(roles=[], access=AccessSettings(operators=(LAB,)), has_heads=True)

    changed = {each.urn for each in before.resources} ^ {each.urn for each in after.resources}
    assert {urn.rsplit("::", 1)[-1] for urn in changed} == {
        "identity-group-lab-at-example.org-login",
        "identity-group-lab-at-example.org-admin-login",
    }


def test_member_labels_tell_people_apart() -> None:
    members = ["group:lab@example.org", "user:lab@example.org", "user:lab.x@example.org", "domain:example.org"]
    alike = ["group:rl_team@example.org", "group:rl-team@example.org", "user:a+b@example.org", "user:a-b@example.org"]
    members += [*alike, "user:x@y-at-z.org", "user:x-at-y@z.org"]

    labels = [member_label(each) for each in members]
    assert len(set(labels)) == len(members)
    assert labels[0] == "group-lab-at-example.org"


# The pipelines' identity


def record_ci(*, preview: bool = True, **args: object) -> Recording:
    def program(opts: pulumi.ResourceOptions) -> None:
        own: dict[str, object] = {
            "site": sample_site(),
            "settings": CI_SETTINGS,
            "grantable": ["roles/x"],
            "apis": make_apis(opts),
        }
        CiIdentity("ci", CiIdentityArgs(**(own | args)), opts)  # type: ignore[arg-type]

    return run(program, preview=preview)


@pytest.mark.parametrize("preview", [True, False])
def test_ci_providers_pin_ids_and_map_a_constant_role(preview: bool) -> None:
    recording = record_ci(preview=preview)

    ids = (
        "assertion.repository_id == '11' && assertion.repository_owner_id == '22'"
        " && assertion.event_name != 'pull_request_target'"
    )
    assert {
        each.inputs["workloadIdentityPoolProviderId"]: (
            each.inputs["attributeCondition"],
            each.inputs["attributeMapping"],
            each.inputs["oidc"],
        )
        for each in recording.of_type(IDENTITY_PROVIDER)
    } == {
        "deploy": (
            f"({ids} && assertion.ref == 'refs/heads/main' && assertion.environment == 'production')",
            {"google.subject": "assertion.sub", "attribute.role": "'deploy'"},
            {"issuerUri": "https://token.actions.githubusercontent.com"},
        ),
        "preview": (
            f"({ids})",
            {"google.subject": "assertion.sub", "attribute.role": "'preview'"},
            {"issuerUri": "https://token.actions.githubusercontent.com"},
        ),
    }
    assert recording.named(CI, "ci").outputs == {
        "deployer_email": "marin-deployer@lab-1234.iam.gserviceaccount.com",
        "previewer_email": "marin-previewer@lab-1234.iam.gserviceaccount.com",
        "deploy_provider": f"{POOL}/providers/deploy",
        "preview_provider": f"{POOL}/providers/preview",
    }
    assert_sound(recording, CI)
    assert_waits_for(recording, CI, "serviceusage")
    assert not [each for each in recording.resources if "Key" in each.type]


def test_ci_accounts_are_bound_to_the_role_of_their_provider_alone() -> None:
    recording = record_ci()

    bound = [each for each in find_grants(recording) if each[1] == "roles/iam.workloadIdentityUser"]
    at = "serviceAccountId projects/lab-1234/serviceAccounts"
    assert set(bound) == {
        (
            f"principalSet://iam.googleapis.com/{POOL}/attribute.role/{role}",
            "roles/iam.workloadIdentityUser",
            f"{at}/marin-{account}@lab-1234.iam.gserviceaccount.com",
        )
        for role, account in (("deploy", "deployer"), ("preview", "previewer"))
    }


def test_ci_what_survives_a_destroy_stays_and_can_be_taken_over() -> None:
    fresh, adopted = record_ci(), record_ci(site=sample_site(adopt=True))

    surviving = (IDENTITY_POOL, IDENTITY_PROVIDER, CUSTOM_ROLE)
    pool = "projects/lab-1234/locations/global/workloadIdentityPools/marin-ci"
    assert {each.name: each.import_id for each in adopted.resources if each.import_id} == {
        "ci-pool": pool,
        "ci-deploy-provider": f"{pool}/providers/deploy",
        "ci-preview-provider": f"{pool}/providers/preview",
        "ci-deployer-role": "projects/lab-1234/roles/marin_deployer",
        "ci-previewer-role": "projects/lab-1234/roles/marin_previewer",
    }
    assert [each for each in fresh.resources if each.import_id] == []
    assert [each for each in (*fresh.resources, *adopted.resources) if each.ignore_changes] == []
    for each in customs(fresh, CI):
        assert each.retain_on_delete == (each.type in surviving), each.urn
        assert (each.inputs.get("deletionPolicy") == "ABANDON") == (each.type in surviving), each.urn


def test_ci_accepts_each_repository_under_its_own_condition() -> None:
    other = RepositorySettings(repository_id=33, owner_id=44, ref="refs/heads/it", environment="live")

    recording = record_ci(settings=replace(CI_SETTINGS, repositories={**CI_SETTINGS.repositories, "lab/other": other}))

    deploy = recording.named(IDENTITY_PROVIDER, "ci-deploy-provider").inputs["attributeCondition"]
    assert [("'11'" in each, "'33'" in each, "'live'" in each) for each in deploy.split(" || ")] == [
        (True, False, False),
        (False, True, True),
    ]
    assert [each.rule for each in apply_rules(recording.resources) if each.rule == "pinned-federation"] == []


def test_ci_rights_follow_what_may_be_deployed() -> None:
    recording = record_ci(settings=replace(CI_SETTINGS, deploys=("queues",)))

    deployer = "serviceAccount:marin-deployer@lab-1234.iam.gserviceaccount.com"
    previewer = "serviceAccount:marin-previewer@lab-1234.iam.gserviceaccount.com"
    granted = {(member, role) for member, role, on in find_grants(recording) if on == "project lab-1234"}
    assert granted == {
        (deployer, "projects/lab-1234/roles/marin_deployer"),
        (deployer, "roles/serviceusage.serviceUsageAdmin"),
        (deployer, "roles/iam.serviceAccountAdmin"),
        (deployer, "roles/resourcemanager.projectIamAdmin"),
        (previewer, "projects/lab-1234/roles/marin_previewer"),
        (previewer, "roles/serviceusage.serviceUsageViewer"),
        (previewer, "roles/iam.serviceAccountViewer"),
    }
    roles = {each.name: each.inputs["permissions"] for each in recording.of_type(CUSTOM_ROLE)}
    assert roles["ci-deployer-role"] == list(find_permissions(["queues"]))
    assert roles["ci-previewer-role"] == [
        "resourcemanager.projects.get",
        "resourcemanager.projects.getIamPolicy",
        "serviceusage.services.use",
        "pubsub.subscriptions.get",
        "pubsub.subscriptions.getIamPolicy",
        "pubsub.subscriptions.list",
        "pubsub.topics.get",
        "pubsub.topics.getIamPolicy",
        "pubsub.topics.list",
    ]


def test_ci_grants_on_what_no_stack_makes_are_protected() -> None:
    key = "projects/lab-1234/locations/us-west4/keyRings/pulumi/cryptoKeys/state"
    settings = replace(CI_SETTINGS, state_bucket="lab-state", state_key=key, billing_account="000000-AAAAAA-111111")

    recording = record_ci(settings=settings)

    kept = {each.name: each.inputs["role"] for each in recording.resources if each.protect and "role" in each.inputs}
    assert kept == {
        "ci-deployer-state": "roles/storage.objectAdmin",
        "ci-previewer-state": "roles/storage.objectViewer",
        "ci-deployer-state-key": "roles/cloudkms.cryptoKeyEncrypterDecrypter",
        "ci-previewer-state-key": "roles/cloudkms.cryptoKeyDecrypter",
        "ci-deployer-budgets": "roles/billing.costsManager",
    }


def test_ci_deployer_reads_nothing_of_what_the_stack_holds() -> None:
    everything = [permission for permissions in PERMISSIONS.values() for permission in permissions]

    for permission in everything:
        assert not permission.startswith(("storage.objects.", "secretmanager.versions."))
        assert not permission.endswith((".consume", ".publish", ".access", ".downloadArtifacts"))
    admins = {each.role for each in PROJECT_ROLES}
    assert not admins & {
        "roles/owner",
        "roles/editor",
        "roles/viewer",
        "roles/pubsub.admin",
        "roles/storage.admin",
        "roles/secretmanager.admin",
        "roles/artifactregistry.admin",
    }
    assert all(each.reason for each in PROJECT_ROLES)


def test_ci_deployer_grants_in_the_project_only_what_the_stack_grants() -> None:
    recording = record_ci(grantable=["roles/logging.logWriter", "projects/lab-1234/roles/marin_main_head"])

    admin = recording.named(PROJECT_GRANT, "ci-deployer-resourcemanager-projectIamAdmin")
    assert admin.inputs["condition"]["expression"] == (
        "api.getAttribute('iam.googleapis.com/modifiedGrantsByRole', []).hasOnly("
        "['projects/lab-1234/roles/marin_main_head', 'roles/logging.logWriter'])"
    )
    conditional = [each.name for each in recording.of_type(PROJECT_GRANT) if "condition" in each.inputs]
    assert conditional == ["ci-deployer-resourcemanager-projectIamAdmin"]


# Alerts


def record_alerts(*, preview: bool = True, **args: object) -> Recording:
    def program(opts: pulumi.ResourceOptions) -> None:
        own: dict[str, object] = {
            "site": sample_site(),
            "settings": AlertSettings(emails=("ops@example.org",)),
            "apis": make_apis(opts),
        }
        Alerts("alerts", AlertsArgs(**(own | args)), opts)  # type: ignore[arg-type]

    return run(program, preview=preview)


QUEUES = {
    "default": WatchedQueue(
        subscription="projects/lab-1234/subscriptions/marin-default",
        dead_letter_subscription="projects/lab-1234/subscriptions/marin-default-dead",
    )
}


def filters(recording: Recording, name: str) -> list[str]:
    conditions = recording.named(POLICY, name).inputs["conditions"]
    return [(each.get("conditionThreshold") or each["conditionAbsent"])["filter"] for each in conditions]


@pytest.mark.parametrize("preview", [True, False])
def test_alerts_of_a_queue_watch_dead_letters_and_the_oldest_task(preview: bool) -> None:
    recording = record_alerts(preview=preview, queues=QUEUES)

    assert [each.name for each in recording.of_type(POLICY)] == [
        "alerts-default-dead-letters",
        "alerts-default-oldest-task",
    ]
    kind = 'resource.type = "pubsub_subscription" AND resource.labels.subscription_id'
    assert filters(recording, "alerts-default-dead-letters") == [
        f'{kind} = "marin-default" AND metric.type = "pubsub.googleapis.com/subscription/dead_letter_message_count"',
        f'{kind} = "marin-default-dead" AND metric.type = "pubsub.googleapis.com/subscription/num_undelivered_messages"',
    ]
    (oldest,) = recording.named(POLICY, "alerts-default-oldest-task").inputs["conditions"]
    assert oldest["conditionThreshold"] == {
        "filter": f'{kind} = "marin-default" AND'
        ' metric.type = "pubsub.googleapis.com/subscription/oldest_unacked_message_age"',
        "comparison": "COMPARISON_GT",
        "thresholdValue": 21 * 86_400,
        "duration": "0s",
        "aggregations": [{"alignmentPeriod": "300s", "perSeriesAligner": "ALIGN_MAX"}],
    }
    channel = f"projects/{PROJECT}/notificationChannels/alerts-email-ops-at-example.org"
    assert all(each.inputs["notificationChannels"] == [channel] for each in recording.of_type(POLICY))
    assert all(
        each.inputs["userLabels"] == LABELS for each in (*recording.of_type(POLICY), *recording.of_type(CHANNEL))
    )
    assert_sound(recording, ALERTS)
    assert_waits_for(recording, ALERTS, "monitoring")


def test_alerts_of_clusters_count_the_tpus_of_a_zone_and_listen_to_each_head() -> None:
    recording = record_alerts(
        clusters={
            "main": WatchedCluster(cluster_name="marin-main", zone="us-west4-a", head="ray-a", max_nodes=1024),
            "small": WatchedCluster(cluster_name="marin-small", zone="us-west4-a", head="ray-b", max_nodes=8),
        }
    )

    assert [each.name for each in recording.of_type(POLICY)] == [
        "alerts-us-west4-a-tpus",
        "alerts-main-head",
        "alerts-small-head",
    ]
    (count,) = recording.named(POLICY, "alerts-us-west4-a-tpus").inputs["conditions"]
    assert count["conditionThreshold"]["thresholdValue"] == 1032
    assert count["conditionThreshold"]["filter"] == (
        'resource.type = "tpu_worker" AND resource.labels.zone = "us-west4-a"'
        ' AND metric.type = "tpu.googleapis.com/memory/usage"'
    )
    assert [each["crossSeriesReducer"] for each in count["conditionThreshold"]["aggregations"]] == [
        "REDUCE_MEAN",
        "REDUCE_COUNT",
    ]
    (silence,) = filters(recording, "alerts-main-head")
    assert silence == (
        'resource.type = "gce_instance" AND metric.labels.instance_name = "ray-a"'
        ' AND metric.type = "compute.googleapis.com/instance/uptime_total"'
    )
    assert_sound(recording, ALERTS)


def test_alerts_with_a_budget_tell_of_spend_and_of_what_is_to_come() -> None:
    settings = AlertSettings(
        emails=tuple(f"op{number}@example.org" for number in range(6)),
        budget=BudgetSettings(billing_account="000000-AAAAAA-111111", monthly=1500, currency="EUR"),
    )

    recording = record_alerts(settings=settings)

    (budget,) = recording.of_type("gcp:billing/budget:Budget")
    assert budget.inputs == {
        "billingAccount": "000000-AAAAAA-111111",
        "displayName": "lab-1234 (marin)",
        "amount": {"specifiedAmount": {"currencyCode": "EUR", "units": "1500"}},
        "budgetFilter": {"projects": ["projects/lab-1234"], "calendarPeriod": "MONTH"},
        "thresholdRules": [
            {"thresholdPercent": 0.5, "spendBasis": "CURRENT_SPEND"},
            {"thresholdPercent": 0.9, "spendBasis": "CURRENT_SPEND"},
            {"thresholdPercent": 1, "spendBasis": "CURRENT_SPEND"},
            {"thresholdPercent": 1, "spendBasis": "FORECASTED_SPEND"},
        ],
        "allUpdatesRule": {
            "monitoringNotificationChannels": [
                f"projects/{PROJECT}/notificationChannels/alerts-email-op{number}-at-example.org" for number in range(5)
            ],
            "disableDefaultIamRecipients": False,
        },
        "deletionPolicy": "DELETE",
    }
    assert budget.ignore_changes == ("budgetFilter.projects",)
    assert depends_on(recording, budget, recording.named(SERVICE, "apis-billingbudgets").urn)
    assert len(recording.of_type(CHANNEL)) == 6


def test_network_with_fixed_addresses_leaves_by_them_alone() -> None:
    recording = record_network(settings=NetworkSettings(nat_addresses=2))

    (nat,) = recording.of_type("gcp:compute/routerNat:RouterNat")
    assert nat.inputs["natIpAllocateOption"] == "MANUAL_ONLY"
    assert len(nat.inputs["natIps"]) == 2
    addresses = recording.of_type("gcp:compute/address:Address")
    assert [(each.inputs["addressType"], each.protect) for each in addresses] == [("EXTERNAL", True)] * 2
    assert [each.rule for each in apply_rules(recording.resources) if each.rule == "closed-addresses"] == []


def test_alerts_reach_channels_that_exist() -> None:
    slack = "projects/lab-1234/notificationChannels/123"
    recording = record_alerts(settings=AlertSettings(channels=(slack,)), queues=QUEUES)

    assert recording.of_type("gcp:monitoring/notificationChannel:NotificationChannel") == []
    policies = recording.of_type("gcp:monitoring/alertPolicy:AlertPolicy")
    assert {tuple(each.inputs["notificationChannels"]) for each in policies} == {(slack,)}


# Machines outside of Google, and pods


ISSUERS = {
    "hpc": IssuerSettings(issuer="https://sso.example.edu/hpc", subjects=("system:serviceaccount:a:b", "node-7"))
}
FEDERATION = "runtime:identity:Federation"


def record_federation(issuers: Mapping[str, IssuerSettings] = ISSUERS) -> Recording:
    return run(
        lambda opts: Federation(
            "federation", FederationArgs(site=sample_site(), issuers=issuers, apis=make_apis(opts)), opts
        )
    )


def test_federation_lets_in_the_listed_subjects_of_each_issuer_and_is_kept() -> None:
    recording = record_federation()

    (provider,) = recording.of_type(IDENTITY_PROVIDER)
    assert provider.inputs["attributeCondition"] == "assertion.sub in ['system:serviceaccount:a:b', 'node-7']"
    assert provider.inputs["oidc"] == {
        "issuerUri": "https://sso.example.edu/hpc",
        "allowedAudiences": ["runtime-worker"],
    }
    assert all(each.protect and each.retain_on_delete for each in customs(recording, FEDERATION))
    assert recording.named(FEDERATION, "federation").outputs["members"] == {
        f"hpc-{index}": f"principal://iam.googleapis.com/{POOL}/subject/{subject}"
        for index, subject in enumerate(ISSUERS["hpc"].subjects)
    }
    assert_sound(recording, FEDERATION)
    bounds = StackBounds(issuers=frozenset({"https://sso.example.edu/hpc"}))
    assert apply_rules(recording.resources, bounds) == []
    found = {each.rule for each in apply_rules(recording.resources, StackBounds(issuers=frozenset()))}
    assert found == {"pinned-federation"}


@pytest.mark.parametrize(
    ("member", "allowed"),
    [
        (f"principal://iam.googleapis.com/{POOL[:-3]}-workers/subject/node-7", True),
        ("serviceAccount:lab-1234.svc.id.goog[train/runtime-job]", True),
        (f"principalSet://iam.googleapis.com/{POOL}/*", False),
        ("serviceAccount:lab-1234.svc.id.goog[train/default]", False),
        ("group:lab@example.org", False),
    ],
)
def test_account_of_workers_is_given_to_one_subject_or_the_pods_of_a_namespace_alone(
    member: str, allowed: bool
) -> None:
    recording = record_identity(roles=[Role.WORKER], sign_ins={"it": member})

    (grant,) = recording.of_type("gcp:serviceaccount/iAMMember:IAMMember")
    assert (grant.inputs["role"], grant.inputs["member"]) == ("roles/iam.workloadIdentityUser", member)
    bounds = StackBounds(members=frozenset({"serviceAccount:lab-1234.svc.id.goog[train/runtime-job]"}))
    pool = record_federation().resources
    found = [each for each in apply_rules([*pool, *recording.resources], bounds) if each.rule == "allowed-members"]
    assert (found == []) == allowed
