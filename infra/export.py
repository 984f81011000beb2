"""Makes and exports the contract of a built stack."""

from __future__ import annotations

from typing import Any, cast

import pulumi

from infra.components.records import CONTRACT
from infra.program import BuiltStack
from infra.settings.model import AttemptAccess, Role, SecretSettings
from runtime.outputs import (
    OUTPUT_NAME,
    SCHEMA,
    BucketOutput,
    ClaimOutput,
    ClusterOutput,
    IdentityOutput,
    KubernetesOutput,
    NamespaceOutput,
    NetworkOutput,
    PubSubQueueOutput,
    RecordsOutput,
    RegistryOutput,
    SecretOutput,
    StackOutputs,
    outputs_fields,
)

USES = {
    Role.WORKER: "serves queues",
    Role.SUBMITTER: "puts tasks into queues",
    Role.PUSHER: "pushes images",
    Role.REAPER: "removes TPU nodes that Ray lost sight of",
}


def export(built: BuiltStack) -> None:
    pulumi.export(OUTPUT_NAME, contract(built))


def contract(built: BuiltStack) -> dict[str, Any]:
    """Return the contract with outputs as leaves, so that a preview shows the known ones."""
    return outputs_fields(_outputs(built))


def _outputs(built: BuiltStack) -> StackOutputs:
    settings = built.settings
    return StackOutputs(
        stack=settings.stack,
        project=settings.project,
        region=settings.region,
        zone=settings.zone,
        labels=dict(settings.labels),
        records=RecordsOutput(url=_leaf(built.records.url), location=built.records.location) if built.records else None,
        queues={
            name: PubSubQueueOutput(
                topic=_leaf(queue.topic),
                subscription=_leaf(queue.subscription),
                dead_letter_topic=_leaf(queue.dead_letter_topic),
                dead_letter_subscription=_leaf(queue.dead_letter_subscription),
                ack_deadline_s=settings.queues[name].ack_deadline_s,
                max_delivery_attempts=settings.queues[name].max_delivery_attempts,
                retention_s=settings.queues[name].retention_s,
                exactly_once=settings.queues[name].exactly_once,
            )
            for name, queue in built.queues.items()
        },
        buckets={
            name: BucketOutput(url=_leaf(each.url), location=each.location) for name, each in built.buckets.items()
        },
        registries={
            name: {region: RegistryOutput(url=_leaf(url)) for region, url in registry.urls.items()}
            for name, registry in built.registries.items()
        },
        secrets={
            name: SecretOutput(
                resource=_leaf(secret.resource), env=secret.env, attempts=_attempts(settings.secrets[name])
            )
            for name, secret in built.secrets.items()
        },
        network=NetworkOutput(network=_leaf(built.network.network), subnet=_leaf(built.network.subnet))
        if built.network
        else None,
        clusters={
            name: ClusterOutput(
                head=head.name,
                cluster_name=head.cluster_name,
                zone=head.zone,
                internal_ip=_leaf(head.internal_ip),
                image=head.image,
                ports=head.ports,
                pools=head.pools,
                worker_identity=_leaf(head.node_email),
                config_sha256=_leaf(head.config_sha256),
            )
            for name, head in built.heads.items()
        },
        kubernetes=_kubernetes(built),
        identities=_identities(built),
        published_url=_leaf(pulumi.Output.concat(built.records.url, f"/{CONTRACT}v{SCHEMA}.json"))
        if built.records
        else None,
    )


def _kubernetes(built: BuiltStack) -> dict[str, KubernetesOutput]:
    clusters = built.settings.kubernetes
    return {
        cluster: KubernetesOutput(
            context=clusters[cluster].context,
            server=clusters[cluster].server,
            slot_namespace=clusters[cluster].slot_namespace,
            namespaces={
                name: NamespaceOutput(
                    service_account=_leaf(workspace.service_account),
                    image_pull_secrets=clusters[cluster].namespaces[name].image_pull_secrets,
                    claims={
                        claim: ClaimOutput(
                            claim=_leaf(bound),
                            size=clusters[cluster].namespaces[name].claims[claim].size,
                            access_mode=clusters[cluster].namespaces[name].claims[claim].access_mode,
                        )
                        for claim, bound in workspace.claims.items()
                    },
                )
                for name, workspace in workspaces.items()
            },
        )
        for cluster, workspaces in built.workspaces.items()
    }


def _identities(built: BuiltStack) -> dict[str, IdentityOutput]:
    found: dict[str, IdentityOutput] = {}
    if built.identity is not None:
        for role, email in built.identity.emails.items():
            found[role.value] = IdentityOutput(email=_leaf(email), use=USES[role])
    for name, head in built.heads.items():
        found[f"{name}-head"] = IdentityOutput(email=_leaf(head.head_email), use=f"runs the head of cluster {name}")
        found[f"{name}-node"] = IdentityOutput(email=_leaf(head.node_email), use=f"runs the nodes of cluster {name}")
    if built.ci is not None:
        found["deployer"] = IdentityOutput(email=_leaf(built.ci.deployer_email), use="deploys from the pipeline")
        found["previewer"] = IdentityOutput(email=_leaf(built.ci.previewer_email), use="previews from the pipeline")
    return found


def _attempts(secret: SecretSettings) -> str | None:
    return (secret.attempts or AttemptAccess.ALL).value if Role.WORKER in secret.readers else None


def _leaf(output: pulumi.Output[str]) -> str:
    """Return an output in place of its later text: the engine resolves outputs anywhere in an export."""
    return cast(str, output)
