"""Ray's own Google node provider and autoscaler, unmodified, on a fake TPU API."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from infra.render import units
from tests.fakes.tpu import TpuServer
from tests.services_support import wait_until


def client_makers(config: Any, endpoints: Mapping[str, str]) -> dict[str, Any]:
    """Return the functions of Ray's module `config` that make Google's clients, with other endpoints and no credentials."""
    from google.auth.credentials import AnonymousCredentials
    from googleapiclient import discovery

    def client(service: str, version: str) -> Any:
        def build(credentials: object = None) -> Any:
            return discovery.build(
                service,
                version,
                credentials=AnonymousCredentials(),
                requestBuilder=config.build_request,
                cache_discovery=False,
                static_discovery=True,
                client_options={"api_endpoint": endpoints[service]} if service in endpoints else None,
            )

        return build

    return {
        "_create_tpu": client("tpu", "v2alpha1"),
        "_create_compute": client("compute", "v1"),
        "_create_crm": client("cloudresourcemanager", "v1"),
        "_create_iam": client("iam", "v1"),
    }


@contextmanager
def google_of(server: TpuServer) -> Iterator[None]:
    """Direct Ray's clients to `server`; only the endpoint differs, for which Ray has no setting."""
    from ray.autoscaler._private.gcp import config
    from ray.autoscaler._private.providers import _clear_provider_cache

    makers = client_makers(config, {service: server.endpoint(service) for service in ("tpu", "compute")})
    before = {name: getattr(config, name) for name in makers}
    for name, maker in makers.items():
        setattr(config, name, maker)
    # Ray keeps a provider for equal settings as long as the process lives, and with it an earlier server.
    _clear_provider_cache()
    try:
        yield
    finally:
        for name, maker in before.items():
            setattr(config, name, maker)


@dataclass
class Shell:
    """Replaces Ray's call of `ssh`: records each command with its node, and succeeds."""

    ran: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of address and command."""

    def check_call(self, command: list[str], **_: object) -> int:
        target = next(index for index, word in enumerate(command) if word.startswith("ray@"))
        self.ran.append((command[target].partition("@")[2], " ".join(command[target + 1 :])))
        return 0

    call = check_call

    def check_output(self, command: list[str], **kwargs: object) -> bytes:
        self.check_call(command)
        return b""

    def Popen(self, command: list[str], **kwargs: object) -> subprocess.Popen[bytes]:  # noqa: N802  its name there
        self.check_call(command)
        return subprocess.Popen(["true"])

    def commands(self, address: str) -> list[str]:
        return [command for to, command in self.ran if to == address]


@dataclass
class Gcs:
    """Ray's store, which the autoscaler asks only to drain nodes."""

    drained: list[bytes] = field(default_factory=list)

    def drain_nodes(self, node_ids: set[bytes], timeout: int) -> set[bytes]:
        self.drained += sorted(node_ids)
        return node_ids


class Autoscaler:
    """Ray's monitor on a file of ours: one call per round, instead of every five seconds."""

    def __init__(self, file: Path, key: Path) -> None:
        from ray.autoscaler._private import autoscaler
        from ray.autoscaler._private.autoscaler import StandardAutoscaler
        from ray.autoscaler._private.load_metrics import LoadMetrics

        # Nodes of the fake send no heartbeat, so Ray would restart them after half a minute of a slow test.
        autoscaler.AUTOSCALER_HEARTBEAT_TIMEOUT_S = 3600
        self._file, self._key = file, key
        self.shell, self.gcs, self.load = Shell(), Gcs(), LoadMetrics()
        self._make = lambda: StandardAutoscaler(
            str(file), self.load, self.gcs, process_runner=self.shell, update_interval_s=0
        )
        self._ray: Any = None

    def apply(self, rendered: str) -> None:
        """Write a rendered file for Ray, as the head does: with the head's own key."""
        text = rendered.replace(units.PRIVATE_KEY, str(self._key)).replace("@@HEAD_PUBLIC_KEY@@", "ssh-ed25519 AAAA")
        self._file.write_text(text)

    @property
    def ray(self) -> Any:
        if self._ray is None:
            self._ray = self._make()
        return self._ray

    def round(self) -> None:
        """Run one round and wait for the launches and node set-ups that it began in threads."""
        failures = self.ray.num_failures
        self.ray.update()
        assert self.ray.num_failures == failures, "Ray's round failed; its log says why"
        assert wait_until(lambda: self.ray.pending_launches.value == 0)
        for updater in list(self.ray.updaters.values()):
            updater.join()

    def workers(self) -> list[str]:
        """List the nodes that Ray counts."""
        return sorted(self.ray.provider.non_terminated_nodes({"ray-node-type": "worker"}))


def node_types(rendered: str) -> dict[str, Any]:
    types: dict[str, Any] = yaml.safe_load(rendered)["available_node_types"]
    return types
