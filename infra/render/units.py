"""The systemd units of heads and nodes, and the script that starts Ray in their container."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Final

from infra.render.cluster import PORTS, RayCluster
from infra.settings.model import MachineSettings

MACHINE: Final = "/opt/runtime-ray/machine.py"
START_SCRIPT: Final = "/opt/runtime-ray/start-ray"
SETUP_SCRIPT: Final = "/opt/runtime-ray/setup"
RUN_SETUP: Final = "/opt/runtime-ray/run-setup"
AUTOSCALER_FILE: Final = "/etc/runtime-ray/config/autoscaler.yaml"
CONTRACT_FILE: Final = "/etc/runtime-ray/config/contract.json"
PRIVATE_KEY: Final = "/etc/runtime-ray/ssh/id_ed25519"
REAPER_FOLDER: Final = "/var/lib/runtime-ray-reaper"
"""On the head: what the reaper has to know in its next run, and its numbers for Prometheus."""

HEAD_UNIT: Final = "runtime-ray-head.service"
WATCH_UNIT: Final = "runtime-ray-watch.service"
REAPER_TIMER: Final = "runtime-ray-reaper.timer"
KEEP_TIMER: Final = "runtime-ray-keep.timer"
SECRETS_TIMER: Final = "runtime-ray-secrets.timer"
NODE_UNIT: Final = "runtime-ray-node.service"

_LOCAL_LOGS: Final = "--log-driver=json-file --log-opt=max-size=50m --log-opt=max-file=5"
_CLOUD_LOGS: Final = (
    # Docker's own driver needs no agent on the machine, and `docker logs` reads the cache that Docker keeps beside it.
    # https://docs.docker.com/engine/logging/drivers/gcplogs/, https://docs.docker.com/engine/logging/dual-logging/
    "--log-driver=gcplogs --log-opt=gcp-project={project} --log-opt=mode=non-blocking "
    "--log-opt=cache-max-size=50m --log-opt=cache-max-file=5"
)
_LIMITS: Final = "--ulimit=memlock=-1:-1 --ulimit=nofile=1048576:1048576 --pids-limit=-1"
_LONGEST_RUN_S: Final = 300
_LONGEST_BUFFER_S: Final = 120
_JOB_START_S: Final = 7 * 24 * 3600
_JOB_STOP_S: Final = 150
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


def render_head_service(cluster: RayCluster) -> str:
    run = _docker_run(
        f"--shm-size={cluster.machine.container.shm_size or '8g'}",
        "--volume=/etc/runtime-ray/config:/etc/runtime-ray/config:ro",
        "--volume=/etc/runtime-ray/ssh:/etc/runtime-ray/ssh:ro",
        # Only the first version of the autoscaler reads its file again every few seconds, without dropping anything.
        "--env=RAY_enable_autoscaler_v2=0",
        # The autoscaler never resets its count of errors: by default it would give up after the sixth, months later.
        "--env=AUTOSCALER_MAX_NUM_FAILURES=1000000000",
        # By default Ray fails a job that has not started within 15 minutes; one that waits for a TPU may wait a week.
        f"--env=RAY_JOB_START_TIMEOUT_SECONDS={_JOB_START_S}",
        # By default Ray kills the driver of a stopped job after 3 s, before its commands have had their grace.
        f"--env=RAY_JOB_STOP_WAIT_TIME_S={_JOB_STOP_S}",
        cluster=cluster,
        settings=cluster.machine,
        machine="head",
    )
    return _service(
        f"Head of Ray cluster {cluster.name}",
        f"""\
        ExecStartPre={MACHINE} wait
        {_setup(cluster.machine)}
        ExecStartPre=-/usr/bin/docker rm --force ray
        ExecStartPre=-{_DROP_OLD_SESSIONS}
        ExecStart={run}
        {_SUPERVISION}
        # Docker keeps and rotates what the container prints.
        StandardOutput=null
        """,
    )


def render_node_service(cluster: RayCluster, settings: MachineSettings) -> str:
    run = _docker_run(
        # TPUs are devices of the host, and libtpu locks its buffers into memory.
        "--privileged",
        # A limit, not a reservation: Ray's object store takes only the memory that it uses.
        f"--shm-size={settings.container.shm_size or '200g'}",
        "--env=RAY_HEAD_IP --env=RAY_OVERRIDE_RESOURCES --env=RAY_OVERRIDE_LABELS",
        cluster=cluster,
        settings=settings,
        machine="node",
    )
    return _service(
        f"Node of Ray cluster {cluster.name}",
        f"""\
        EnvironmentFile=/etc/runtime-ray/node.env
        ExecStartPre={MACHINE} wait
        {_setup(settings)}
        ExecStartPre=-/usr/bin/docker rm --force ray
        ExecStart={run}
        {_SUPERVISION}
        StandardOutput=null
        """,
    )


def _setup(settings: MachineSettings) -> str:
    # The unit's own output goes nowhere; `systemd-cat` puts the script's into the unit's journal.
    return f"ExecStartPre=/usr/bin/systemd-cat --identifier=runtime-ray-setup {RUN_SETUP}" if settings.setup else ""


def render_setup(setup: str) -> str:
    """Render the script of the settings: as it is if it names its interpreter, else as Bash that stops at an error."""
    head = "" if setup.startswith("#!") else "#!/bin/bash\nset -euo pipefail\n"
    return f"{head}{setup}" if setup.endswith("\n") else f"{head}{setup}\n"


def render_run_setup() -> str:
    """Render the program that runs the set-up script unless this machine has run it."""
    return f"""\
#!/bin/bash
# Runs the set-up script once on this machine, and again after its text has changed.
set -euo pipefail

readonly SETUP="${{RUNTIME_RAY_ROOT:-}}{SETUP_SCRIPT}"

now="$(sha256sum <"${{SETUP}}")"
if [[ -e "${{SETUP}}.done" && "$(cat "${{SETUP}}.done")" == "${{now}}" ]]; then
  exit 0
fi
status=0
"${{SETUP}}" </dev/null || status=$?
if ((status)); then
  echo "runtime-ray: the set-up script failed with exit ${{status}}; Ray does not start before it succeeds" >&2
  exit "${{status}}"
fi
echo "${{now}}" >"${{SETUP}}.done"
"""


def render_watch_service(cluster: RayCluster) -> str:
    return _service(
        f"Applies new settings of Ray cluster {cluster.name}",
        f"""\
        ExecStart={MACHINE} watch
        Restart=always
        RestartSec=5
        """,
        needs_docker=False,
    )


def render_reaper(cluster: RayCluster) -> tuple[str, str]:
    """Render the service that removes dead nodes, and its timer."""
    title = f"Removes dead TPU nodes of Ray cluster {cluster.name}"
    service = _runtime(
        title,
        f"cluster reap --cluster {shlex.quote(cluster.key)} --state {REAPER_FOLDER} "
        f"--metrics-file {REAPER_FOLDER}/reaper.prom",
        f"--volume={REAPER_FOLDER}:{REAPER_FOLDER}",
        name="runtime-ray-reaper",
        cluster=cluster,
    )
    # A preempted node is gone within 120 s. By itself systemd would be up to a minute late.
    return service, _timer(title, first="3min", every="45s", exact=True)


def render_keep(cluster: RayCluster) -> tuple[str, str]:
    """Render the service that takes up the jobs that a lost driver or head left, and its timer."""
    title = f"Takes up jobs of Ray cluster {cluster.name} that lost their driver"
    address = f"http://127.0.0.1:{PORTS['dashboard']}"
    service = _runtime(
        title,
        f"keep --once --cluster {shlex.quote(cluster.key)} --address {address}",
        name="runtime-ray-keep",
        cluster=cluster,
        # After the loss of a head there may be hundreds of jobs, one after the other.
        longest_s=1800,
    )
    return service, _timer(title, first="30s", every="60s")


def render_buffer(cluster: RayCluster) -> tuple[str, str]:
    """Render the service that asks Ray for the idle nodes of the pools' buffers, and its timer.

    The command runs in Ray's own container, so the service has no image of its own: it may start while Ray runs, and an
    image of newer settings, which waits for a restart, does not stop it.
    """
    title = f"Keeps the buffers of idle nodes of Ray cluster {cluster.name}"
    # A command in a container outlives its client, so it has a limit of its own.
    run = (
        f"/usr/bin/docker exec --env=RUNTIME_OUTPUTS={CONTRACT_FILE} ray timeout {_LONGEST_BUFFER_S} runtime cluster buffer "
        f"--cluster {shlex.quote(cluster.key)} --address http://127.0.0.1:{PORTS['dashboard']}"
    )
    return _oneshot(title, run), _timer(title, first="30s", every="30s", exact=True)


def _runtime(
    title: str, words: str, *options: str, name: str, cluster: RayCluster, longest_s: int = _LONGEST_RUN_S
) -> str:
    """Render a service that runs a command of this package once, in the cluster's image and with the head's contract."""
    run = " ".join(
        (
            f"/usr/bin/docker run --rm --name={name} --network=host --user=0 {_logs(cluster)}",
            "--volume=/etc/runtime-ray/config:/etc/runtime-ray/config:ro",
            *options,
            f"--env=RUNTIME_OUTPUTS={CONTRACT_FILE} --entrypoint=runtime {shlex.quote(cluster.image)}",
            words,
        )
    )
    # A container that outlived its client, as after a time-out, would keep the name and stop every later run.
    return _oneshot(title, run, before=f"-/usr/bin/docker rm --force {name}", longest_s=longest_s)


def render_secrets(cluster: RayCluster) -> tuple[str, str]:
    """Render the service that fetches the secrets again, and its timer."""
    title = f"Fetches the secrets of Ray cluster {cluster.name} again"
    service = _oneshot(title, f"{MACHINE} secrets", needs_docker=False)
    return service, _timer(title, first="15min", every="15min")


def render_start_script(cluster: RayCluster, settings: MachineSettings) -> str:
    """Render the container's script for heads and nodes: it exports secrets and variables, and starts Ray in the foreground."""
    # The names are those of variables, and the values are quoted for a shell.
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(settings.variables.items()))
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
{variables}
export RAY_ROTATION_MAX_BYTES=$((100 * 1024 * 1024))
export RAY_ROTATION_BACKUP_COUNT=5

# Names that no variable of a stack has.
RUNTIME_OPTIONS=(
{_options(shared)}
  --disable-usage-stats
  --block
)

case "${{1:?head or node}}" in
  head)
    RUNTIME_OPTIONS+=(
      --head
      --num-cpus=0
      --autoscaling-config={AUTOSCALER_FILE}
      --dashboard-host=127.0.0.1
{_options(head, indent=6)}
    )
    ;;
  node)
    RUNTIME_OPTIONS+=(--address="${{RAY_HEAD_IP:?}}:{PORTS["gcs"]}")
    ;;
  *)
    echo "start-ray: no such machine: $1" >&2
    exit 2
    ;;
esac

{_FORWARD if cluster.cloud_logging else ""}exec ray start "${{RUNTIME_OPTIONS[@]}}"
"""


_FORWARD: Final = """\
# Ray's processes log into files; this copies their lines to the container's output, which goes to Cloud Logging. Without
# the link to the session before, `tail` asks every second for the files of the one that begins now.
readonly RUNTIME_SESSION="${RAY_TMPDIR:-/tmp}/ray/session_latest"
rm -f "${RUNTIME_SESSION}"
tail --follow=name --retry --lines=+1 --quiet --pid="$$" "${RUNTIME_SESSION}"/logs/{monitor,gcs_server,raylet}.{log,out,err} 2>/dev/null &

"""


def _logs(cluster: RayCluster) -> str:
    return _CLOUD_LOGS.format(project=shlex.quote(cluster.project)) if cluster.cloud_logging else _LOCAL_LOGS


def _options(names: Mapping[str, str], *, indent: int = 2) -> str:
    return "\n".join(f"{' ' * indent}--{option}={PORTS[port]}" for option, port in names.items())


def _docker_run(*options: str, cluster: RayCluster, settings: MachineSettings, machine: str) -> str:
    # Folders, not files: the container would keep seeing the old file after a replacement.
    volumes = (
        "--volume=/run/runtime-ray:/run/runtime-ray:ro --volume=/opt/runtime-ray:/opt/runtime-ray:ro "
        "--volume=/var/lib/runtime-ray:/tmp/ray"
    )
    container = settings.container
    # `machine_rules` admits no character that systemd or a shell reads. Docker takes the last of two limits.
    own = "".join(f" {each}" for each in container.options or ())
    own += "".join(f" --volume={each}" for each in container.mounts or ())
    return (
        f"/usr/bin/docker run --rm --init --name=ray --network=host --user=0 {_logs(cluster)} {_LIMITS} "
        f"{' '.join(options)} {volumes}{own} --entrypoint=/bin/bash {shlex.quote(cluster.image)} {START_SCRIPT} {machine}"
    )


def _oneshot(
    description: str, command: str, *, before: str = "", needs_docker: bool = True, longest_s: int = _LONGEST_RUN_S
) -> str:
    first = f"ExecStartPre={before}\n" if before else ""
    body = f"Type=oneshot\n{first}ExecStart={command}\nTimeoutStartSec={longest_s}"
    return _service(description, body, needs_docker=needs_docker)


def _service(description: str, body: str, *, needs_docker: bool = True) -> str:
    after = "network-online.target docker.service" if needs_docker else "network-online.target"
    lines = "\n".join(line.strip() for line in body.splitlines() if line.strip())
    return f"""\
[Unit]
Description={description}
Wants=network-online.target
After={after}
StartLimitIntervalSec=0

[Service]
{lines}
"""


def _timer(description: str, *, first: str, every: str, exact: bool = False) -> str:
    """Render a timer that counts from the end of the last run; unless `exact`, machines of many stacks spread theirs."""
    when = "AccuracySec=1s" if exact else "RandomizedDelaySec=15s"
    return f"""\
[Unit]
Description={description}

[Timer]
OnActiveSec={first}
OnUnitInactiveSec={every}
{when}
"""
