"""What has to be done by hand before a stack can use its encryption key, as commands."""

from __future__ import annotations

from infra.components.key import AGENTS, MADE_AS_IDENTITIES, ROLE, agent_member
from infra.settings.forms import KEY
from infra.settings.model import StackSettings


def list_key_needs(settings: StackSettings) -> list[str]:
    """List the commands in order. NUMBER is the number of the stack's project."""
    found, services = KEY.fullmatch(settings.kms_key or ""), settings.encrypted_services
    if found is None:
        return []
    # https://cloud.google.com/storage/docs/getting-service-agent
    storage = [f"gcloud storage service-agent --project {settings.project}"] if "storage" in services else []
    if settings.grants_key:
        return storage
    apis = " ".join(f"{each}.googleapis.com" for each in services)
    enabled = [f"gcloud services enable {apis} --project {settings.project}"]
    identities = [
        f"gcloud beta services identity create --service {each}.googleapis.com --project {settings.project}"
        for each in services
        if each in MADE_AS_IDENTITIES
    ]
    place = f"--project {found['project']} --location {found['location']} --keyring {found['ring']}"
    grants = [
        f"gcloud kms keys add-iam-policy-binding {found['key']} {place}"
        f" --member {agent_member(each, 'NUMBER')} --role {ROLE}"
        for each in AGENTS
        if each in services
    ]
    return [*enabled, *storage, *identities, *grants]
