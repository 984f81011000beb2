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

_LOGS: Final = ("--log-driver=json-file", "--log-opt=max-size=50m", "--log-opt=max-file=5")
_LIMITS: Final = ("--ulimit=memlock=-1:-1", "--ulimit=nofile=1048576:1048576", "--pids-limit=-1")
_SESSION_DAYS: Final = 7


def render_head_service(cluster: Cluster) -> str:
    run = _docker_run(
        *_LIMITS,
        "--shm-size=8g",
        "--volume=/etc/runtime-ray/config:/etc/runtime-ray/config:ro",
        "--volume=/etc/runtime-ray/ssh:/etc/runtime-ray/ssh:ro",
        # The first autoscaler is the one whose code reads this file again every few seconds and drops nothing for it.
        "--env=RAY_enable_autoscaler_v2=0",
        # It counts errors for ever and would give up after the sixth, months later.
        "--env=AUTOSCALER_MAX_NUM_FAILURES=1000000000",
        image=cluster.image,
        arguments=("head",),
    )
    return _service(
        f"Head of Ray cluster {cluster.name}",
        f"""\
        ExecStartPre={MACHINE} wait
        ExecStartPre=-/usr/bin/docker rm --force ray
        ExecStartPre=-{_drop_old_sessions()}
        ExecStart={run}
        ExecStop=/usr/bin/docker stop --time 60 ray
        Restart=always
        RestartSec=10
        TimeoutStartSec=infinity
        TimeoutStopSec=90
        LimitMEMLOCK=infinity
        # Docker keeps and rotates what the container prints.
        StandardOutput=null
        """,
    )


def render_node_service(cluster: Cluster) -> str:
    run = _docker_run(
        *_LIMITS,
        # TPUs are devices of the host, and libtpu locks its buffers into memory.
        "--privileged",
        # A cap, not a reservation: Ray's object store takes what it needs of it.
        "--shm-size=200g",
        "--env=RAY_HEAD_IP",
        "--env=RAY_OVERRIDE_RESOURCES",
        "--env=RAY_OVERRIDE_LABELS",
        image=cluster.image,
        arguments=("node",),
    )
    return _service(
        f"Node of Ray cluster {cluster.name}",
        f"""\
        EnvironmentFile=/etc/runtime-ray/node.env
        ExecStartPre={MACHINE} wait
        ExecStartPre=-/usr/bin/docker rm --force ray
        ExecStart={run}
        ExecStop=/usr/bin/docker stop --time 60 ray
        Restart=always
        RestartSec=10
        TimeoutStartSec=infinity
        TimeoutStopSec=90
        LimitMEMLOCK=infinity
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


def render_reaper_service(cluster: Cluster) -> str:
    command = shlex.join(
        (
            "/usr/bin/docker",
            "run",
            "--rm",
            "--name=runtime-ray-reaper",
            "--network=host",
            "--user=0",
            *_LOGS,
            "--volume=/etc/runtime-ray/config:/etc/runtime-ray/config:ro",
            f"--env=RUNTIME_OUTPUTS={CONTRACT_FILE}",
            "--entrypoint=runtime",
            cluster.image,
            "cluster",
            "reap",
            "--cluster",
            cluster.key,
        )
    )
    return _service(
        f"Removes dead TPU nodes of Ray cluster {cluster.name}",
        f"""\
        Type=oneshot
        ExecStart={command}
        TimeoutStartSec=300
        """,
    )


def render_reaper_timer(cluster: Cluster) -> str:
    return _timer(f"Removes dead TPU nodes of Ray cluster {cluster.name}", first="3min", every="2min")


def render_secrets_service(cluster: Cluster) -> str:
    return _service(
        f"Fetches the secrets of Ray cluster {cluster.name} again",
        f"""\
        Type=oneshot
        ExecStart={MACHINE} secrets
        TimeoutStartSec=300
        """,
        needs_docker=False,
    )


def render_secrets_timer(cluster: Cluster) -> str:
    return _timer(f"Fetches the secrets of Ray cluster {cluster.name} again", first="15min", every="15min")


def render_start_script() -> str:
    """Runs in the container, on heads and nodes alike: secrets into the environment, then Ray in the foreground."""
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


def _docker_run(*options: str, image: str, arguments: tuple[str, ...]) -> str:
    return shlex.join(
        (
            "/usr/bin/docker",
            "run",
            "--rm",
            "--init",
            "--name=ray",
            "--network=host",
            "--user=0",
            *_LOGS,
            *options,
            # Folders, not files: a file that is replaced would stay the old one inside.
            "--volume=/run/runtime-ray:/run/runtime-ray:ro",
            "--volume=/opt/runtime-ray:/opt/runtime-ray:ro",
            "--volume=/var/lib/runtime-ray:/tmp/ray",
            "--entrypoint=/bin/bash",
            image,
            START_SCRIPT,
            *arguments,
        )
    )


def _drop_old_sessions() -> str:
    """Ray keeps the logs of each of its starts in a folder of its own, for ever."""
    return (
        f"/usr/bin/find /var/lib/runtime-ray -mindepth 1 -maxdepth 1 -name session_* -mtime +{_SESSION_DAYS} "
        "-exec rm -rf {} +"
    )


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
