"""The systemd units of heads and nodes, and the script that starts Ray in their container."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Final

from infra.render.cluster import PORTS, Cluster

MACHINE: Final = "/opt/runtime-ray/machine.py"
START_SCRIPT: Final = "/opt/runtime-ray/start-ray"
AUTOSCALER_FILE: Final = "/etc/runtime-ray/config/autoscaler.yaml"
CONTRACT_FILE: Final = "/etc/runtime-ray/config/contract.json"
PRIVATE_KEY: Final = "/etc/runtime-ray/ssh/id_ed25519"

HEAD_UNIT: Final = "runtime-ray-head.service"
WATCH_UNIT: Final = "runtime-ray-watch.service"
REAPER_TIMER: Final = "runtime-ray-reaper.timer"
SECRETS_TIMER: Final = "runtime-ray-secrets.timer"
NODE_UNIT: Final = "runtime-ray-node.service"

_LOGS: Final = "--log-driver=json-file --log-opt=max-size=50m --log-opt=max-file=5"
_LIMITS: Final = "--ulimit=memlock=-1:-1 --ulimit=nofile=1048576:1048576 --pids-limit=-1"
_DROP_OLD_SESSIONS: Final = (
    "/usr/bin/find /var/lib/runtime-ray -mindepth 1 -maxdepth 1 -name session_* -mtime +7 -exec rm -rf {} +"
)
"""Ray keeps the logs of each start in a folder of its own, for ever."""
_SUPERVISION: Final = """\
ExecStop=/usr/bin/docker stop --time 60 ray
Restart=always
RestartSec=10
TimeoutStartSec=infinity
TimeoutStopSec=90
LimitMEMLOCK=infinity"""


def render_head_service(cluster: Cluster) -> str:
    run = _docker_run(
        "--shm-size=8g",
        "--volume=/etc/runtime-ray/config:/etc/runtime-ray/config:ro",
        "--volume=/etc/runtime-ray/ssh:/etc/runtime-ray/ssh:ro",
        # Only the first version of the autoscaler reads its file again every few seconds, without dropping anything.
        "--env=RAY_enable_autoscaler_v2=0",
        # The autoscaler never resets its count of errors: by default it would give up after the sixth, months later.
        "--env=AUTOSCALER_MAX_NUM_FAILURES=1000000000",
        image=cluster.image,
        machine="head",
    )
    return _service(
        f"Head of Ray cluster {cluster.name}",
        f"""\
        ExecStartPre={MACHINE} wait
        ExecStartPre=-/usr/bin/docker rm --force ray
        ExecStartPre=-{_DROP_OLD_SESSIONS}
        ExecStart={run}
        {_SUPERVISION}
        # Docker keeps and rotates what the container prints.
        StandardOutput=null
        """,
    )


def render_node_service(cluster: Cluster) -> str:
    run = _docker_run(
        # TPUs are devices of the host, and libtpu locks its buffers into memory.
        "--privileged",
        # A limit, not a reservation: Ray's object store takes only the memory that it uses.
        "--shm-size=200g",
        "--env=RAY_HEAD_IP --env=RAY_OVERRIDE_RESOURCES --env=RAY_OVERRIDE_LABELS",
        image=cluster.image,
        machine="node",
    )
    return _service(
        f"Node of Ray cluster {cluster.name}",
        f"""\
        EnvironmentFile=/etc/runtime-ray/node.env
        ExecStartPre={MACHINE} wait
        ExecStartPre=-/usr/bin/docker rm --force ray
        ExecStart={run}
        {_SUPERVISION}
        StandardOutput=null
        """,
    )


def render_watch_service(cluster: Cluster) -> str:
    return _service(
        f"Applies new settings of Ray cluster {cluster.name}",
        f"""\
        ExecStart={MACHINE} watch
        Restart=always
        RestartSec=5
        """,
        needs_docker=False,
    )


def render_reaper(cluster: Cluster) -> tuple[str, str]:
    """Render the service that removes dead nodes, and its timer."""
    title = f"Removes dead TPU nodes of Ray cluster {cluster.name}"
    command = (
        f"/usr/bin/docker run --rm --name=runtime-ray-reaper --network=host --user=0 {_LOGS} "
        "--volume=/etc/runtime-ray/config:/etc/runtime-ray/config:ro "
        f"--env=RUNTIME_OUTPUTS={CONTRACT_FILE} --entrypoint=runtime {shlex.quote(cluster.image)} "
        f"cluster reap --cluster {shlex.quote(cluster.key)}"
    )
    return _oneshot(title, command), _timer(title, first="3min", every="2min")


def render_secrets(cluster: Cluster) -> tuple[str, str]:
    """Render the service that fetches the secrets again, and its timer."""
    title = f"Fetches the secrets of Ray cluster {cluster.name} again"
    service = _oneshot(title, f"{MACHINE} secrets", needs_docker=False)
    return service, _timer(title, first="15min", every="15min")


def render_start_script() -> str:
    """Render the container's script for heads and nodes: it exports the secrets and starts Ray in the foreground."""
    shared = {
        "node-manager-port": "node_manager",
        "object-manager-port": "object_manager",
        "runtime-env-agent-port": "runtime_env_agent",
        "dashboard-agent-grpc-port": "agent_grpc",
        "dashboard-agent-listen-port": "agent",
        "metrics-export-port": "metrics",
        "min-worker-port": "worker_min",
        "max-worker-port": "worker_max",
    }
    head = {"port": "gcs", "dashboard-port": "dashboard", "ray-client-server-port": "client"}
    return f"""\
#!/bin/bash
set -euo pipefail

# Exported one by one and never printed: no `set -x` here.
if [[ -r /run/runtime-ray/environment ]]; then
  # shellcheck source=/dev/null
  source /run/runtime-ray/environment
fi

export RAY_ROTATION_MAX_BYTES=$((100 * 1024 * 1024))
export RAY_ROTATION_BACKUP_COUNT=5

options=(
{_options(shared)}
  --disable-usage-stats
  --block
)

case "${{1:?head or node}}" in
  head)
    options+=(
      --head
      --num-cpus=0
      --autoscaling-config={AUTOSCALER_FILE}
      --dashboard-host=0.0.0.0
{_options(head, indent=6)}
    )
    ;;
  node)
    options+=(--address="${{RAY_HEAD_IP:?}}:{PORTS["gcs"]}")
    ;;
  *)
    echo "start-ray: no such machine: $1" >&2
    exit 2
    ;;
esac

exec ray start "${{options[@]}}"
"""


def _options(names: Mapping[str, str], *, indent: int = 2) -> str:
    return "\n".join(f"{' ' * indent}--{option}={PORTS[port]}" for option, port in names.items())


def _docker_run(*options: str, image: str, machine: str) -> str:
    # Folders, not files: the container would keep seeing the old file after a replacement.
    volumes = (
        "--volume=/run/runtime-ray:/run/runtime-ray:ro --volume=/opt/runtime-ray:/opt/runtime-ray:ro "
        "--volume=/var/lib/runtime-ray:/tmp/ray"
    )
    return (
        f"/usr/bin/docker run --rm --init --name=ray --network=host --user=0 {_LOGS} {_LIMITS} {' '.join(options)} "
        f"{volumes} --entrypoint=/bin/bash {shlex.quote(image)} {START_SCRIPT} {machine}"
    )


def _oneshot(description: str, command: str, *, needs_docker: bool = True) -> str:
    body = f"Type=oneshot\nExecStart={command}\nTimeoutStartSec=300"
    return _service(description, body, needs_docker=needs_docker)


def _service(description: str, body: str, *, needs_docker: bool = True) -> str:
    after = "network-online.target docker.service" if needs_docker else "network-online.target"
    lines = "\n".join(line.strip() for line in body.strip().splitlines())
    return f"""\
[Unit]
Description={description}
Wants=network-online.target
After={after}
StartLimitIntervalSec=0

[Service]
{lines}
"""


def _timer(description: str, *, first: str, every: str) -> str:
    return f"""\
[Unit]
Description={description}

[Timer]
OnActiveSec={first}
OnUnitInactiveSec={every}
RandomizedDelaySec=15s
"""
