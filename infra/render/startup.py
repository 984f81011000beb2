"""The boot scripts of heads and nodes, and the files that they install from the metadata.

Both scripts run at every boot, and again on request to the guest agent. A second run of an unchanged script changes
nothing and does not touch Ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

from infra.machine.head_agent import AUTOSCALER_KEY, MANIFEST_KEY
from infra.render import units
from infra.render.cluster import PORTS, RayCluster, cpus_per_host
from infra.settings.model import MachineSettings, TpuPoolSettings
from runtime.errors import InvalidValue
from runtime.outputs import ClusterOutput, RecordsOutput, StackOutputs, encode_outputs

MACHINE_KEY: Final = "ray-machine"
STARTUP_KEY: Final = "startup-script"

METADATA_LIMIT_BYTES: Final = 256 * 1024
"""Limit of one value in bytes; all values together may have twice that. https://cloud.google.com/compute/docs/metadata/setting-custom-metadata"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledFile:
    key: str
    """Key in the machine's metadata."""
    path: str
    text: str
    mode: str = "0644"
    live: bool = False
    """Whether a change takes effect while Ray runs; other files wait for a restart."""


def render_machine() -> str:
    """Return the source of the program that heads and nodes run."""
    return resources.files("infra.machine").joinpath("head_agent.py").read_text(encoding="utf-8")


def render_settings(cluster: RayCluster) -> str:
    secrets = [{"env": each.env, "resource": each.resource} for each in sorted(cluster.secrets, key=lambda s: s.env)]
    return _json({"cluster": cluster.name, "image": cluster.image, "secrets": secrets})


def render_contract(cluster: RayCluster, config_sha256: str) -> str:
    """Render the part of the stack's contract that the commands on the head need, so that they look for no other."""
    outputs = StackOutputs(
        stack=cluster.stack,
        project=cluster.project,
        region=cluster.region,
        zone=cluster.zone,
        records=RecordsOutput(url=cluster.records) if cluster.records else None,
        clusters={
            cluster.key: ClusterOutput(
                head=cluster.head,
                cluster_name=cluster.name,
                zone=cluster.zone,
                internal_ip=f"{cluster.head}.{cluster.zone}.c.{cluster.project}.internal",
                image=cluster.image,
                ports=PORTS,
                pools=pool_outputs(cluster.pools),
                worker_identity=cluster.node_email,
                config_sha256=config_sha256,
            )
        },
    )
    return encode_outputs(outputs) + "\n"


def pool_outputs(pools: Mapping[str, TpuPoolSettings]) -> dict[str, object]:
    """Return the pools in the contract's form."""
    return {
        name: {
            "accelerator": pool.accelerator,
            "runtime_version": pool.runtime_version,
            "capacity": str(pool.capacity),
            "min": pool.min,
            "max": pool.max,
            **({"buffer": pool.buffer} if pool.buffer else {}),
            "cpus": cpus_per_host(pool),
        }
        for name, pool in sorted(pools.items())
    }


def head_files(cluster: RayCluster, autoscaler: str, config_sha256: str) -> list[InstalledFile]:
    reaper, reaper_timer = units.render_reaper(cluster)
    return [
        *_shared_files(cluster, cluster.machine),
        InstalledFile(key=AUTOSCALER_KEY, path=units.AUTOSCALER_FILE, text=autoscaler, mode="0600", live=True),
        InstalledFile(
            key="ray-contract", path=units.CONTRACT_FILE, text=render_contract(cluster, config_sha256), live=True
        ),
        _unit("ray-head-service", units.HEAD_UNIT, units.render_head_service(cluster)),
        _unit("ray-watch-service", units.WATCH_UNIT, units.render_watch_service(cluster)),
        _unit("ray-reaper-service", "runtime-ray-reaper.service", reaper),
        _unit("ray-reaper-timer", units.REAPER_TIMER, reaper_timer),
        *_keep_files(cluster),
        *_buffer_files(cluster),
    ]


def _keep_files(cluster: RayCluster) -> list[InstalledFile]:
    if cluster.records is None:
        return []
    keep, timer = units.render_keep(cluster)
    return [
        _unit("ray-keep-service", "runtime-ray-keep.service", keep),
        _unit("ray-keep-timer", units.KEEP_TIMER, timer),
    ]


def _buffer_files(cluster: RayCluster) -> list[InstalledFile]:
    if not any(pool.buffer for pool in cluster.pools.values()):
        return []
    service, timer = units.render_buffer(cluster)
    return [
        _unit("ray-buffer-service", "runtime-ray-buffer.service", service, live=True),
        _unit("ray-buffer-timer", "runtime-ray-buffer.timer", timer, live=True),
    ]


def head_metadata(cluster: RayCluster, autoscaler: str, config_sha256: str) -> dict[str, str]:
    """Render the head's metadata: the boot script, the autoscaler file, and the other files, each under its key.

    Raises `InvalidValue` for a text that is too long for the metadata.
    """
    files = head_files(cluster, autoscaler, config_sha256)
    metadata = {
        STARTUP_KEY: render_head_script(
            config_sha256, has_setup=bool(cluster.machine.setup), has_records=cluster.records is not None
        ),
        **_as_metadata(files),
    }
    for key, text in metadata.items():
        if len(text.encode()) > METADATA_LIMIT_BYTES:
            raise InvalidValue(
                f"metadata `{key}` of head {cluster.key}",
                f"{len(text.encode()):,} bytes",
                f"at most {METADATA_LIMIT_BYTES:,} bytes",
                hint="spread the pools over two heads",
            )
    return metadata


def node_metadata(cluster: RayCluster, machine: MachineSettings) -> dict[str, str]:
    service = _unit("ray-node-service", units.NODE_UNIT, units.render_node_service(cluster, machine))
    return {STARTUP_KEY: render_node_script(), **_as_metadata([*_shared_files(cluster, machine), service])}


def render_head_script(config_sha256: str, *, has_setup: bool = False, has_records: bool = False) -> str:
    timers = " ".join((units.REAPER_TIMER, *([units.KEEP_TIMER] if has_records else []), units.SECRETS_TIMER))
    own = (f"/etc/systemd/system/{units.HEAD_UNIT}", units.START_SCRIPT, *([units.SETUP_SCRIPT] if has_setup else []))
    ray_files = " ".join(path.lstrip("/") for path in own)
    return (
        _PREAMBLE
        + f"""
# Of the autoscaler file that belongs to this script.
readonly CONFIG_SHA256={config_sha256}

main() {{
  say "config ${{CONFIG_SHA256}}"
  install_packages
  install_files
  # Before anything is waited for, so that a corrected setting arrives while this script still waits.
  systemctl restart {units.WATCH_UNIT}
  "${{MACHINE}}" wait
  start_unit {units.HEAD_UNIT} {ray_files}
  systemctl start {timers}
  "${{MACHINE}}" ready
}}

main "$@"
"""
    )


def render_node_script() -> str:
    return (
        _PREAMBLE
        + f"""
main() {{
  install_packages
  install_files
  systemctl start {units.SECRETS_TIMER}
  # The head starts Ray over SSH, once it knows where it is; the image is fetched meanwhile. A member starts Ray itself.
  "${{MACHINE}}" wait
  "${{MACHINE}}" join
}}

main "$@"
"""
    )


_PREAMBLE: Final = f"""\
#!/bin/bash
# Runs at every boot and may run at any time: twice in a row changes nothing.
set -euo pipefail

readonly METADATA="http://${{GCE_METADATA_HOST:-metadata.google.internal}}/computeMetadata/v1"
readonly ROOT="${{RUNTIME_RAY_ROOT:-}}"
readonly MACHINE="${{ROOT}}{units.MACHINE}"
readonly STATE="${{ROOT}}/run/runtime-ray"
readonly PAUSE_S="${{RUNTIME_RAY_WAIT_S:-5}}"

say() {{
  echo "runtime-ray: $*"
}}

# Repeats a command until it works, longer apart each time up to two minutes.
again() {{
  local pause="${{PAUSE_S}}"
  until "$@"; do
    say "waiting: $*"
    sleep "${{pause}}"
    pause="$(awk -v pause="${{pause}}" 'BEGIN {{ pause *= 2; print (pause > 120) ? 120 : pause }}')"
  done
}}

install_packages() {{
  if ! command -v docker >/dev/null || ! command -v python3 >/dev/null || ! command -v ssh-keygen >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    again apt-get update --quiet
    again apt-get install --quiet --yes --no-install-recommends docker.io python3 openssh-client ca-certificates curl
  fi
  again systemctl start docker.service
}}

fetch() {{
  curl --fail --silent --show-error --header 'Metadata-Flavor: Google' --output "$2" "${{METADATA}}/instance/attributes/$1"
}}

install_files() {{
  install -d -m 0700 "$(dirname "${{MACHINE}}")" "${{STATE}}"
  again fetch {MACHINE_KEY} "${{MACHINE}}.new"
  chmod 0755 "${{MACHINE}}.new"
  mv "${{MACHINE}}.new" "${{MACHINE}}"
  again "${{MACHINE}}" install
}}

# Starts a unit, or starts it again if its files are others than those that it was started with.
start_unit() {{
  local unit="$1" record="${{STATE}}/started-$1" files
  shift
  files="$(cd "${{ROOT:-/}}" && sha256sum "$@")"
  if [[ -e "${{record}}" && "$(cat "${{record}}")" == "${{files}}" ]]; then
    again systemctl start "${{unit}}"
  else
    again systemctl restart "${{unit}}"
    echo "${{files}}" >"${{record}}"
  fi
}}
"""


def _shared_files(cluster: RayCluster, machine: MachineSettings) -> list[InstalledFile]:
    secrets, secrets_timer = units.render_secrets(cluster)
    start = units.render_start_script(cluster, machine)
    return [
        *_setup_files(machine),
        InstalledFile(key=MACHINE_KEY, path=units.MACHINE, text=render_machine(), mode="0755"),
        InstalledFile(
            key="ray-settings", path="/etc/runtime-ray/settings.json", text=render_settings(cluster), live=True
        ),
        InstalledFile(key="ray-start", path=units.START_SCRIPT, text=start, mode="0755"),
        _unit("ray-secrets-service", "runtime-ray-secrets.service", secrets),
        _unit("ray-secrets-timer", units.SECRETS_TIMER, secrets_timer),
    ]


def _setup_files(machine: MachineSettings) -> list[InstalledFile]:
    if not machine.setup:
        return []
    return [
        InstalledFile(key="ray-setup", path=units.SETUP_SCRIPT, text=units.render_setup(machine.setup), mode="0755"),
        InstalledFile(key="ray-run-setup", path=units.RUN_SETUP, text=units.render_run_setup(), mode="0755"),
    ]


def _unit(key: str, unit: str, text: str, *, live: bool = False) -> InstalledFile:
    return InstalledFile(key=key, path=f"/etc/systemd/system/{unit}", text=text, live=live)


def _as_metadata(files: list[InstalledFile]) -> dict[str, str]:
    files = sorted(files, key=lambda each: each.key)
    manifest = [{"key": each.key, "path": each.path, "mode": each.mode, "live": each.live} for each in files]
    return {MANIFEST_KEY: _json(manifest), **{each.key: each.text for each in files}}


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
