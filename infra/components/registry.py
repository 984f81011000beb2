"""Image repositories of a stack, one in each region."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pulumi
from pulumi_gcp import artifactregistry

from infra.components.apis import Apis
from infra.components.shared import Members, Part, StackSite
from infra.naming import KEPT
from infra.settings.model import DAY_S, RegistrySettings
from infra.settings.read import ensure_valid
from runtime.outputs import image_path

READER: Final = "roles/artifactregistry.reader"
WRITER: Final = "roles/artifactregistry.writer"

Place: TypeAlias = tuple[pulumi.Input[str], pulumi.Input[str], pulumi.Input[str]]
"""Project, location and id of a repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryArgs:
    site: StackSite
    registry: str
    settings: RegistrySettings = RegistrySettings()
    readers: Members = field(default_factory=dict)
    """Label → IAM member."""
    guests: Members = field(default_factory=dict)
    """Accounts of this stack, which also read another stack's repositories. Other readers get their grants from the owner:
    two stacks with the same grant would remove it from each other."""
    writers: Members = field(default_factory=dict)
    apis: Apis | None = None


class Registry(Part):
    """Docker repositories with mutable tags and a clean-up, and references to another stack's repositories."""

    urls: dict[str, pulumi.Output[str]]
    """Region → `REGION-docker.pkg.dev/PROJECT/REPOSITORY`."""
    repositories: dict[str, pulumi.Output[str]]
    """Region → `projects/P/locations/REGION/repositories/N`."""
    caches: dict[str, pulumi.Output[str]]
    """Region → address of the pull-through cache, if the settings ask for one."""
    cache_repositories: dict[str, pulumi.Output[str]]

    def __init__(self, name: str, args: RegistryArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        settings = args.settings
        ensure_valid(settings, f"registries.{args.registry}")
        super().__init__("runtime:registry:Registry", name, args.site, args.apis, opts)
        self.urls, self.repositories, self.caches, self.cache_repositories = {}, {}, {}, {}
        repository_id = settings.repository or args.site.names.repository(args.registry)
        for region in dict.fromkeys((*(settings.regions or (args.site.region,)), *settings.existing)):
            if region in settings.existing:
                self._use_existing(f"{name}-{region}", region, settings.existing[region], args.guests)
                continue
            made = self._make(f"{name}-{region}", region, repository_id, args)
            self.urls[region], self.repositories[region] = _url(made), _path(made)
            self._grant(f"{name}-{region}", _place(made), READER, {**args.readers, **args.guests})
            self._grant(f"{name}-{region}", _place(made), WRITER, args.writers)
            if settings.pull_through is not None:
                cache = self._make_cache(f"{name}-{region}-cache", region, settings.pull_through, args)
                self.caches[region], self.cache_repositories[region] = _url(cache), _path(cache)
                everyone = {**args.readers, **args.guests, **args.writers}
                self._grant(f"{name}-{region}-cache", _place(cache), READER, everyone)
        self._register()

    def _make(self, name: str, region: str, repository_id: str, args: RegistryArgs) -> artifactregistry.Repository:
        settings = args.settings
        return artifactregistry.Repository(
            f"{name}-repository",
            project=args.site.project,
            location=region,
            repository_id=repository_id,
            description=f"Images `{args.registry}` of stack {args.site.names.stack}",
            format="DOCKER",
            mode="STANDARD_REPOSITORY",
            labels=args.site.labels,
            # Immutable tags would cover `latest` too and keep the clean-up from deleting any image with a tag.
            docker_config=artifactregistry.RepositoryDockerConfigArgs(immutable_tags=False),
            cleanup_policies=[
                _delete_older_than(settings.keep_days),
                # Without a prefix this policy holds for each package.
                artifactregistry.RepositoryCleanupPolicyArgs(
                    id="keep-newest",
                    action="KEEP",
                    most_recent_versions=artifactregistry.RepositoryCleanupPolicyMostRecentVersionsArgs(
                        keep_count=settings.keep_newest
                    ),
                ),
                artifactregistry.RepositoryCleanupPolicyArgs(
                    id="keep-tagged",
                    action="KEEP",
                    condition=artifactregistry.RepositoryCleanupPolicyConditionArgs(
                        tag_state="TAGGED", tag_prefixes=[KEPT]
                    ),
                ),
            ],
            cleanup_policy_dry_run=settings.cleanup_dry_run,
            vulnerability_scanning_config=artifactregistry.RepositoryVulnerabilityScanningConfigArgs(
                enablement_config="INHERITED"
            ),
            kms_key_name=self._kms_key,
            deletion_policy="DELETE",
            opts=self._kept("artifactregistry", needs=self._key_grants("artifactregistry")),
        )

    def _make_cache(self, name: str, region: str, host: str, args: RegistryArgs) -> artifactregistry.Repository:
        return artifactregistry.Repository(
            f"{name}-repository",
            project=args.site.project,
            location=region,
            repository_id=args.site.names.repository(f"{args.registry}-cache"),
            description=f"Copies of images of {host}",
            format="DOCKER",
            mode="REMOTE_REPOSITORY",
            labels=args.site.labels,
            remote_repository_config=artifactregistry.RepositoryRemoteRepositoryConfigArgs(
                description=host, docker_repository=_upstream(host)
            ),
            cleanup_policies=[_delete_older_than(args.settings.keep_days)],
            cleanup_policy_dry_run=args.settings.cleanup_dry_run,
            vulnerability_scanning_config=artifactregistry.RepositoryVulnerabilityScanningConfigArgs(
                enablement_config="INHERITED"
            ),
            kms_key_name=self._kms_key,
            deletion_policy="DELETE",
            # A cache fills itself again.
            opts=self._options(
                "artifactregistry", needs=self._key_grants("artifactregistry"), delete_before_replace=True
            ),
        )

    def _grant(self, name: str, place: Place, role: str, members: Members, *services: str) -> None:
        project, location, repository = place
        for label, member in members.items():
            artifactregistry.RepositoryIamMember(
                f"{name}-{label}-{role.rsplit('.', 1)[-1]}",
                project=project,
                location=location,
                repository=repository,
                role=role,
                member=member,
                opts=self._options(*services),
            )

    def _use_existing(self, name: str, region: str, path: str, guests: Members) -> None:
        _, project, _, location, _, repository = path.split("/")
        self.repositories[region] = pulumi.Output.from_input(path)
        self.urls[region] = pulumi.Output.from_input(f"{location}-docker.pkg.dev/{image_path(project)}/{repository}")
        self._grant(name, (project, location, repository), READER, guests, "artifactregistry")


def _place(repository: artifactregistry.Repository) -> Place:
    return repository.project, repository.location, repository.repository_id


def _delete_older_than(days: int) -> artifactregistry.RepositoryCleanupPolicyArgs:
    return artifactregistry.RepositoryCleanupPolicyArgs(
        id="delete-old",
        action="DELETE",
        condition=artifactregistry.RepositoryCleanupPolicyConditionArgs(
            # In seconds, as Google answers: `30d` would come back as another text.
            tag_state="ANY",
            older_than=f"{days * DAY_S}s",
        ),
    )


def _upstream(host: str) -> artifactregistry.RepositoryRemoteRepositoryConfigDockerRepositoryArgs:
    if host == "docker.io":
        return artifactregistry.RepositoryRemoteRepositoryConfigDockerRepositoryArgs(public_repository="DOCKER_HUB")
    return artifactregistry.RepositoryRemoteRepositoryConfigDockerRepositoryArgs(
        custom_repository=artifactregistry.RepositoryRemoteRepositoryConfigDockerRepositoryCustomRepositoryArgs(
            uri=f"https://{host}"
        )
    )


def _url(repository: artifactregistry.Repository) -> pulumi.Output[str]:
    project = repository.project.apply(image_path)
    return pulumi.Output.concat(repository.location, "-docker.pkg.dev/", project, "/", repository.repository_id)


def _path(repository: artifactregistry.Repository) -> pulumi.Output[str]:
    """Return the full name, made from inputs: a preview knows these, but not the resource's id."""
    return pulumi.Output.concat(
        "projects/", repository.project, "/locations/", repository.location, "/repositories/", repository.repository_id
    )
