"""The boot scripts and the machine's own program, run for real in a folder that serves as a machine's root."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.machine import head_agent as machine_module
from infra.render import units
from infra.render.autoscaler import render_autoscaler
from infra.render.cluster import PORTS, RayCluster, SecretReference
from infra.render.startup import (
    METADATA_LIMIT_BYTES,
    head_metadata,
    node_metadata,
    render_contract,
    render_head_script,
    render_machine,
    render_node_script,
)
from infra.settings.model import MachineSettings
from runtime.client.jobs.targets import make_context
from runtime.clusters.pools import read_pools
from runtime.config import load_settings
from runtime.errors import InvalidValue
from runtime.jobs.plan import Target
from runtime.launchers.ray.settings import read_place
from runtime.outputs import RecordsOutput, parse_outputs
from tests.infra.machine_support import TOKEN, Machine, finish
from tests.infra.render_support import IMAGE, SHAPES, V4, sample_cluster
from tests.services_support import wait_until

HF = "projects/p-1/secrets/marin-hf-token"
VALUE = 'hf_It\'s "secret"\nof two lines $HOME `id`'
SCRIPTS = {
    "boot script of a head": render_head_script("0" * 64),
    "boot script of a node": render_node_script(),
    "start script": units.render_start_script(sample_cluster(), MachineSettings()),
}


def metadata_of(cluster: RayCluster) -> dict[str, str]:
    rendered = render_autoscaler(cluster)
    return head_metadata(cluster, rendered, hashlib.sha256(rendered.encode()).hexdigest())


@pytest.fixture
def new_machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(metadata: dict[str, str], *, image: bool = True, secret: str | None = VALUE) -> Machine:
        machine = Machine(tmp_path / f"machine-{len(made)}", metadata)
        made.append(machine)
        if image:
            machine.push_image(IMAGE)
        if secret is not None:
            machine.server.versions[HF] = [secret]
        return machine

    yield make
    for machine in made:
        machine.server.stop()


# the text


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_valid_shell(name: str) -> None:
    done = subprocess.run(["bash", "-n"], input=SCRIPTS[name], text=True, capture_output=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_has_nothing_that_shellcheck_warns_of(name: str) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed; install it with `apt-get install shellcheck`")
    done = subprocess.run(["shellcheck", "-"], input=SCRIPTS[name], text=True, capture_output=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")


def test_checkers_of_shell_find_a_broken_script() -> None:
    broken = SCRIPTS["boot script of a head"].replace("  fi\n", "", 1)
    assert subprocess.run(["bash", "-n"], input=broken, text=True, capture_output=True, check=False).returncode != 0
    if shutil.which("shellcheck"):
        unquoted = "#!/bin/bash\nrm -rf $1\n"
        done = subprocess.run(["shellcheck", "-"], input=unquoted, text=True, capture_output=True, check=False)
        assert done.returncode != 0


def test_machine_program_is_python_3_8_and_needs_the_standard_library_only() -> None:
    tree = ast.parse(render_machine(), feature_version=(3, 8))

    imported = {
        name.name.partition(".")[0] for each in ast.walk(tree) if isinstance(each, ast.Import) for name in each.names
    }
    imported |= {str(each.module).partition(".")[0] for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    assert imported == {
        "__future__", "argparse", "base64", "collections", "hashlib", "json", "os", "pathlib", "random", "re",
        "shlex", "socket", "subprocess", "sys", "time", "typing", "urllib",
    }  # fmt: skip


def test_machine_program_and_renderers_name_the_same_things() -> None:
    assert "/" + machine_module.PRIVATE_KEY == units.PRIVATE_KEY
    assert machine_module.NODE_UNIT == units.NODE_UNIT
    assert PORTS["node_manager"] == machine_module.RAYLET_PORT
    manifest = {each["key"]: each for each in json.loads(metadata_of(sample_cluster())["ray-files"])}
    assert manifest[machine_module.AUTOSCALER_KEY]["path"] == units.AUTOSCALER_FILE
    assert manifest["ray-settings"]["path"] == "/" + machine_module.SETTINGS


def test_metadata_lists_every_file_that_it_holds() -> None:
    for metadata in (metadata_of(sample_cluster()), node_metadata(sample_cluster(), MachineSettings())):
        listed = {each["key"] for each in json.loads(metadata["ray-files"])}
        assert metadata.keys() - listed == {"startup-script", "ray-files"}


def test_metadata_holds_no_value_but_only_the_names_of_secrets() -> None:
    text = json.dumps(metadata_of(sample_cluster()))

    assert "projects/p-1/secrets/marin-hf-token" in text
    assert "PRIVATE KEY" not in text


def test_metadata_has_room_for_every_shape_of_pool() -> None:
    sizes = {key: len(text) for key, text in metadata_of(sample_cluster(pools=SHAPES)).items()}

    assert max(sizes.values()) < METADATA_LIMIT_BYTES / 4


def test_metadata_beyond_the_limit_is_refused() -> None:
    many = {f"pool-{number:04}": V4 for number in range(400)}

    with pytest.raises(InvalidValue) as refused:
        metadata_of(sample_cluster(pools=many))
    assert refused.value.field == "metadata `ray-autoscaler` of head main"


def test_contract_on_the_head_is_one_that_the_runtime_reads() -> None:
    cluster = sample_cluster()

    found = parse_outputs(json.loads(render_contract(cluster, "0" * 64)))

    assert (found.project, found.clusters["main"].cluster_name, found.clusters["main"].pools["v4"]["max"]) == (
        "p-1",
        "marin-main",
        1024,
    )
    assert found.records == RecordsOutput(url="gs://p-1-marin-records")


def test_contract_on_the_head_leads_a_target_of_its_cluster_to_the_records_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = tmp_path / "contract.json"
    contract.write_text(render_contract(sample_cluster(), "0" * 64))
    target = Target(
        name="main", kind="ray", stack="marin", settings={"cluster": "main", "address": "http://127.0.0.1:8265"}
    )

    monkeypatch.setenv("RUNTIME_OUTPUTS", str(contract))
    place = read_place(target, make_context(load_settings()))

    assert place.root.startswith("gs://p-1-marin-records/jobs-of-ray")
    assert (place.address, place.tunnel) == ("http://127.0.0.1:8265", None)


def test_head_of_a_stack_without_records_takes_up_no_jobs() -> None:
    with_records, without = metadata_of(sample_cluster()), metadata_of(sample_cluster(records=None))

    assert with_records.keys() - without.keys() == {"ray-keep-service", "ray-keep-timer"}
    assert "systemctl start runtime-ray-reaper.timer runtime-ray-secrets.timer\n" in without["startup-script"]
    assert parse_outputs(json.loads(without["ray-contract"])).records is None


@pytest.mark.golden
@pytest.mark.parametrize("key", sorted(metadata_of(sample_cluster()).keys() - {"ray-machine"}))
def test_metadata_of_a_head_matches_its_golden_file(key: str, golden: Callable[[str, str], None]) -> None:
    golden(f"infra/ray/head/{key}", metadata_of(sample_cluster())[key])


def test_metadata_of_a_node_matches_its_golden_file(golden: Callable[[str, str], None]) -> None:
    metadata = node_metadata(sample_cluster(), MachineSettings())

    golden("infra/ray/node/startup-script", metadata["startup-script"])
    golden("infra/ray/node/ray-node-service", metadata["ray-node-service"])


# booting a head


def test_head_boots_once_and_the_second_run_changes_nothing(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(metadata_of(sample_cluster()))

    code, out = finish(machine.boot())
    assert code == 0, out
    first, key = machine.snapshot(), machine.text("etc/runtime-ray/ssh/id_ed25519")
    assert "systemctl restart runtime-ray-head.service" in machine.notes
    assert machine.server.last("state") == "ready"
    machine.forget_notes()

    code, out = finish(machine.boot())

    assert code == 0, out
    assert machine.snapshot() == first
    assert machine.text("etc/runtime-ray/ssh/id_ed25519") == key
    # The watcher restarts, since it waits for these changes; Ray keeps running.
    assert [line for line in machine.notes if line.startswith("systemctl")] == [
        "systemctl start docker.service",
        "systemctl restart runtime-ray-watch.service",
        "systemctl start runtime-ray-head.service",
        "systemctl start runtime-ray-reaper.timer runtime-ray-keep.timer runtime-ray-secrets.timer",
    ]
    assert not any(line.startswith("docker pull") for line in machine.notes)


def test_head_boots_with_its_own_key_in_the_autoscaler_file(new_machine: Callable[..., Machine]) -> None:
    metadata = metadata_of(sample_cluster())
    machine = new_machine(metadata)
    finish(machine.boot())

    public = machine.text("etc/runtime-ray/ssh/id_ed25519.pub").strip()
    installed = machine.text("etc/runtime-ray/config/autoscaler.yaml")

    assert public.startswith("ssh-ed25519 ")
    assert installed == metadata["ray-autoscaler"].replace("@@HEAD_PUBLIC_KEY@@", public)
    assert installed.count(public) == 1
    assert machine.mode("etc/runtime-ray/ssh/id_ed25519") == "0o600"
    assert machine.mode("etc/runtime-ray/config/autoscaler.yaml") == "0o600"
    digest = hashlib.sha256(metadata["ray-autoscaler"].encode()).hexdigest()
    assert machine.server.last("config-sha256") == digest
    assert f"readonly CONFIG_SHA256={digest}" in metadata["startup-script"]


def test_head_waits_for_secret_and_image_and_says_which(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(metadata_of(sample_cluster()), image=False, secret=None)
    boot = machine.boot()

    assert wait_until(lambda: machine.server.last("waiting-for") == "secret marin-hf-token: it has no version")
    assert machine.server.last("state") == "waiting"
    assert "systemctl restart runtime-ray-watch.service" in machine.notes
    machine.server.versions[HF] = [VALUE]
    image = f"image {IMAGE}: Error response from daemon: manifest for {IMAGE} not found"
    assert wait_until(lambda: machine.server.last("waiting-for") == image)
    assert not any("runtime-ray-head.service" in line for line in machine.notes)
    machine.push_image(IMAGE)

    code, out = finish(boot)
    assert code == 0, out
    assert machine.server.values("state")[-1] == "ready"
    assert machine.server.last("waiting-for") == "nothing"
    assert machine.notes.index("systemctl restart runtime-ray-head.service") > machine.notes.index(
        f"docker pull {IMAGE}"
    )


def test_head_without_guest_attributes_boots_all_the_same(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(metadata_of(sample_cluster()))
    machine.server.guest_attributes = False

    code, out = finish(machine.boot())

    assert code == 0, out
    assert "no guest attribute" in out


def test_head_that_was_given_another_image_is_started_again_by_its_boot_script(
    new_machine: Callable[..., Machine],
) -> None:
    machine = new_machine(metadata_of(sample_cluster()))
    finish(machine.boot())
    machine.forget_notes()
    newer = IMAGE.replace("a" * 64, "b" * 64)
    machine.push_image(newer)
    machine.server.set(metadata_of(sample_cluster(image=newer)))

    code, out = finish(machine.boot())

    assert code == 0, out
    assert machine.notes.index(f"docker pull {newer}") < machine.notes.index(
        "systemctl restart runtime-ray-head.service"
    )
    assert "systemctl daemon-reload" in machine.notes


def test_secret_lies_in_one_file_of_root_alone(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(metadata_of(sample_cluster()))

    code, out = finish(machine.boot())

    assert code == 0
    environment = machine.root / "run/runtime-ray/environment"
    assert (machine.mode("run/runtime-ray/environment"), machine.mode("run/runtime-ray")) == ("0o600", "0o700")
    shown = subprocess.run(
        ["bash", "-c", f'source "{environment}"; printf %s "$HF_TOKEN"'], capture_output=True, text=True, check=True
    )
    assert shown.stdout == VALUE
    for canary in ("hf_It", "of two lines", TOKEN):
        holders = [path for path in machine.files() if canary in path.read_text(errors="replace")]
        assert holders == ([] if canary == TOKEN else [environment])
        assert canary not in out
        assert canary not in "\n".join(machine.notes)
        assert canary not in str(machine.server.reported)


# while it runs


def test_watch_applies_a_changed_pool_without_touching_ray(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(metadata_of(sample_cluster()))
    finish(machine.boot())
    machine.forget_notes()
    watch = machine.run("watch", "--rounds", "2")
    assert wait_until((machine.root / "run/runtime-ray/restart-needed").exists)
    more = metadata_of(sample_cluster(pools={"v4": dataclasses.replace(V4, max=2048)}))

    machine.server.set(more)
    code, out = finish(watch)

    assert code == 0, out
    public = machine.text("etc/runtime-ray/ssh/id_ed25519.pub").strip()
    installed = machine.text("etc/runtime-ray/config/autoscaler.yaml")
    assert installed == more["ray-autoscaler"].replace("@@HEAD_PUBLIC_KEY@@", public)
    assert "max_workers: 2048" in installed
    assert (
        parse_outputs(json.loads(machine.text("etc/runtime-ray/config/contract.json")))
        .clusters["main"]
        .pools["v4"]["max"]
        == 2048
    )
    assert machine.server.last("config-sha256") == hashlib.sha256(more["ray-autoscaler"].encode()).hexdigest()
    assert machine.notes == []
    assert machine.server.last("restart-needed") == "no"


def test_watch_names_what_needs_a_restart(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(metadata_of(sample_cluster()))
    finish(machine.boot())
    before = machine.text("etc/systemd/system/runtime-ray-head.service")
    machine.server.set(metadata_of(sample_cluster(image=IMAGE.replace("a" * 64, "b" * 64))))

    code, out = finish(machine.run("watch", "--rounds", "1"))

    assert code == 0, out
    assert machine.server.last("restart-needed") == "ray-head-service, ray-keep-service, ray-reaper-service"
    assert machine.text("etc/systemd/system/runtime-ray-head.service") == before


def test_head_from_before_a_unit_is_told_and_takes_it_with_the_next_boot_script(
    new_machine: Callable[..., Machine],
) -> None:
    old = sample_cluster(records=None)
    machine = new_machine(metadata_of(old))
    finish(machine.boot())
    machine.server.set(metadata_of(sample_cluster()))
    code, out = finish(machine.run("watch", "--rounds", "1"))
    assert code == 0, out
    # The contract takes effect at once, the units do not.
    assert "gs://p-1-marin-records" in machine.text("etc/runtime-ray/config/contract.json")
    assert machine.server.last("restart-needed") == "ray-keep-service, ray-keep-timer"
    machine.forget_notes()

    code, out = finish(machine.boot())

    assert code == 0, out
    assert machine.server.last("restart-needed") == "no"
    # None of Ray's own files changed, so Ray runs on.
    assert "systemctl start runtime-ray-head.service" in machine.notes
    assert "systemctl start runtime-ray-reaper.timer runtime-ray-keep.timer runtime-ray-secrets.timer" in machine.notes


def test_buffer_of_a_pool_takes_effect_on_a_head_that_runs_and_its_removal_too(
    new_machine: Callable[..., Machine],
) -> None:
    machine = new_machine(metadata_of(sample_cluster()))
    finish(machine.boot())
    machine.forget_notes()
    machine.server.set(metadata_of(sample_cluster(pools={"v4": dataclasses.replace(V4, buffer=2)})))

    code, out = finish(machine.run("watch", "--rounds", "1"))

    assert code == 0, out
    assert machine.notes == ["systemctl daemon-reload", "systemctl start runtime-ray-buffer.timer"]
    assert "runtime cluster buffer" in machine.text("etc/systemd/system/runtime-ray-buffer.service")
    assert buffer_of(machine) == 2
    assert machine.server.last("restart-needed") == "no"

    # The timer runs on, and takes back what was asked for.
    machine.forget_notes()
    machine.server.set(metadata_of(sample_cluster()))
    assert finish(machine.run("watch", "--rounds", "1"))[0] == 0
    assert (machine.notes, buffer_of(machine)) == ([], 0)


def buffer_of(machine: Machine) -> int:
    outputs = parse_outputs(json.loads(machine.text("etc/runtime-ray/config/contract.json")))
    (pool,) = read_pools(outputs.clusters["main"])
    return pool.buffer


def test_head_without_a_buffer_has_no_part_of_it() -> None:
    with_buffer = metadata_of(sample_cluster(pools={"v4": dataclasses.replace(V4, buffer=2)}))
    without = metadata_of(sample_cluster())

    assert with_buffer.keys() - without.keys() == {"ray-buffer-service", "ray-buffer-timer"}
    assert "buffer" not in without["ray-contract"] + without["startup-script"] + without["ray-files"]


def test_watch_outlives_a_metadata_server_that_is_away(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(metadata_of(sample_cluster()))
    finish(machine.boot())
    machine.server.set({"ray-files": "no json"})

    code, out = finish(machine.run("watch", "--rounds", "2"))

    assert code == 0
    assert out.count("cannot follow the metadata") == 2


def test_rotation_fetches_the_newest_enabled_version(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(metadata_of(sample_cluster()))
    finish(machine.boot())

    machine.server.versions[HF] += ["second", None]
    assert finish(machine.run("secrets"))[0] == 0
    assert machine.text("run/runtime-ray/environment") == "export HF_TOKEN=second\n"
    assert machine.server.last("rotation") == "new values"
    assert finish(machine.run("secrets"))[0] == 0
    assert machine.server.last("rotation") == "unchanged"


def test_file_of_secrets_is_read_by_a_program_as_bash_reads_it_and_replaced_in_one_step(
    new_machine: Callable[..., Machine],
) -> None:
    odd = {
        "ODD": VALUE,
        "LINES": "one\n\nexport OTHER=injected\n# no comment\n",
        "SIGNS": "$(id) `id` \\ \\\\ ' '' \" ; & | > < * ? ~ # ! = é 日本 \t",
        "EMPTY": "",
    }
    secrets = tuple(SecretReference(env=name, resource=f"projects/p-1/secrets/{name.lower()}") for name in odd)
    machine = new_machine(metadata_of(sample_cluster(secrets=secrets)))
    for name, value in odd.items():
        machine.server.versions[f"projects/p-1/secrets/{name.lower()}"] = [value]
    finish(machine.boot())
    path = machine.root / "run/runtime-ray/environment"
    before = path.stat().st_ino

    words = shlex.split(path.read_text())
    names = " ".join(odd)
    bash = subprocess.run(
        ["bash", "-c", f'source "$1"; for name in {names}; do printf "%s\\0" "${{!name}}"; done', "read", str(path)],
        capture_output=True,
        check=True,
    ).stdout.decode()
    machine.server.versions["projects/p-1/secrets/odd"] = [VALUE, "second"]
    assert finish(machine.run("secrets"))[0] == 0

    assert words[::2] == ["export"] * len(odd)
    assert dict(word.split("=", 1) for word in words[1::2]) == odd
    assert bash.split("\0")[:-1] == list(odd.values())
    assert path.stat().st_ino != before, "another file took its place, whole"
    assert (machine.mode("run/runtime-ray/environment"), machine.mode("run/runtime-ray")) == ("0o600", "0o700")
    # The container sees the folder, so that it sees the file that took the place of the first.
    assert "--volume=/run/runtime-ray:/run/runtime-ray:ro" in units.render_head_service(sample_cluster())
    assert "--user=0" in units.render_node_service(sample_cluster(), MachineSettings())


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("denied", "kept the old values: secret marin-hf-token: this machine may not read it"),
        ("disabled", "kept the old values: secret marin-hf-token: it has no enabled version"),
        ("gone", "kept the old values: secret marin-hf-token: it has no version"),
    ],
)
def test_rotation_that_fails_keeps_the_old_values_and_says_why(
    new_machine: Callable[..., Machine], trouble: str, said: str
) -> None:
    machine = new_machine(metadata_of(sample_cluster()))
    finish(machine.boot())
    before = machine.text("run/runtime-ray/environment")
    if trouble == "denied":
        machine.server.denied.add(HF)
    machine.server.versions[HF] = {"denied": [VALUE], "disabled": [None, None], "gone": []}[trouble]  # type: ignore[assignment]

    code, out = finish(machine.run("secrets"))

    assert code == 1
    assert machine.server.last("rotation") == said
    assert machine.text("run/runtime-ray/environment") == before
    assert "hf_It" not in out


def test_one_secret_that_lacks_keeps_all_of_them_as_they_were(new_machine: Callable[..., Machine]) -> None:
    two = (
        SecretReference(env="HF_TOKEN", resource=HF),
        SecretReference(env="WANDB_API_KEY", resource="projects/p-1/secrets/marin-wandb"),
    )
    machine = new_machine(metadata_of(sample_cluster(secrets=two)))
    boot = machine.boot()

    assert wait_until(lambda: machine.server.last("waiting-for") == "secret marin-wandb: it has no version")
    assert not (machine.root / "run/runtime-ray/environment").exists()
    machine.server.versions["projects/p-1/secrets/marin-wandb"] = ["w"]
    assert finish(boot)[0] == 0
    assert machine.text("run/runtime-ray/environment").count("export ") == 2


# nodes


def test_node_boots_and_leaves_the_start_to_the_head(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(node_metadata(sample_cluster(), MachineSettings()))

    code, out = finish(machine.boot())

    assert code == 0, out
    assert machine.mode("run/runtime-ray/environment") == "0o600"
    assert [line for line in machine.notes if line.startswith("systemctl")] == [
        "systemctl start docker.service",
        "systemctl daemon-reload",
        "systemctl start runtime-ray-secrets.timer",
    ]
    assert not (machine.root / "etc/runtime-ray/ssh").exists()


@pytest.mark.usefixtures("own_umask")
def test_start_node_writes_what_ray_said_and_waits_until_it_listens(
    new_machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = new_machine(node_metadata(sample_cluster(), MachineSettings()))
    finish(machine.boot())
    machine.forget_notes()
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine_module, "ROOT", machine.root)
    monkeypatch.setattr(machine_module, "METADATA", machine.server.address)
    monkeypatch.setattr(machine_module, "GOOGLE", f"http://{machine.server.address}")
    monkeypatch.setenv("RAY_HEAD_IP", "10.64.0.2")
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU":120,"TPU":4}')
    answers = iter([False, True])
    monkeypatch.setattr(machine_module, "listens", lambda port: next(answers))
    monkeypatch.setattr(machine_module.time, "sleep", lambda _: None)

    machine_module.main(["start-node"])

    assert machine.text("etc/runtime-ray/node.env") == (
        'RAY_HEAD_IP="10.64.0.2"\nRAY_OVERRIDE_RESOURCES="{\\"CPU\\":120,\\"TPU\\":4}"\n'
    )
    assert "systemctl restart runtime-ray-node.service" in machine.notes
    assert machine.server.last("state") == "ready"


def test_start_node_without_a_head_says_so(new_machine: Callable[..., Machine]) -> None:
    machine = new_machine(node_metadata(sample_cluster(), MachineSettings()))
    finish(machine.boot())

    code, out = finish(machine.run("start-node"))

    assert code == 1
    assert "RAY_HEAD_IP is not set" in out


# members


MEMBER: dict[str, object] = {
    "head": "10.64.0.2",
    "hosts": 2,
    "labels": {"runtime-member": "eval"},
    "resources": {"CPU": 120, "TPU": 4, "memory": 5},
    "type": "v4-16",
}


@pytest.fixture
def raylet_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        yield raylet.getsockname()[1]


def member_metadata(port: int, **more: str) -> dict[str, str]:
    """Return a member's metadata; its Ray listens on `port`."""
    metadata = {**node_metadata(sample_cluster(), MachineSettings()), "ray-member": json.dumps(MEMBER), **more}
    metadata["ray-machine"] = metadata["ray-machine"].replace("RAYLET_PORT = 6380", f"RAYLET_PORT = {port}")
    return metadata


def read_node_environment(machine: Machine) -> dict[str, object]:
    pairs = (line.split("=", 1) for line in shlex.split(machine.text("etc/runtime-ray/node.env")))
    return {name: json.loads(value) if value.startswith("{") else value for name, value in pairs}


@pytest.mark.parametrize(
    ("attributes", "head"),
    [
        ({"agent-worker-number": "0"}, {"TPU-v4-16-head": 1}),
        ({"agent-worker-number": "1"}, {}),
        ({"tpu-env": "ACCELERATOR_TYPE: 'v4-16'\nWORKER_ID: '0'\nZONE: 'z'\n"}, {"TPU-v4-16-head": 1}),
        ({"tpu-env": "ACCELERATOR_TYPE: 'v4-16'\nWORKER_ID: '1'\nZONE: 'z'\n"}, {}),
    ],
)
def test_member_boots_and_joins_by_itself_and_its_first_host_alone_is_the_slices(
    new_machine: Callable[..., Machine], raylet_port: int, attributes: dict[str, str], head: dict[str, int]
) -> None:
    machine = new_machine(member_metadata(raylet_port, **attributes))

    code, out = finish(machine.boot())

    assert code == 0, out
    assert read_node_environment(machine) == {
        "RAY_HEAD_IP": "10.64.0.2",
        "RAY_OVERRIDE_RESOURCES": {"CPU": 120, "TPU": 4, "memory": 5, **head},
        "RAY_OVERRIDE_LABELS": {"runtime-member": "eval"},
    }
    assert machine.notes[-1] == "systemctl restart runtime-ray-node.service"
    assert machine.server.last("state") == "ready"

    code, out = finish(machine.boot())

    assert (code, machine.notes[-1]) == (0, "systemctl start runtime-ray-node.service"), out


def test_member_of_several_hosts_waits_until_google_says_which_host_it_is(
    new_machine: Callable[..., Machine], raylet_port: int
) -> None:
    metadata = member_metadata(raylet_port)
    machine = new_machine(metadata)
    booting = machine.boot()
    assert wait_until(lambda: machine.server.last("waiting-for") == "number of this host in its slice")
    assert not (machine.root / "etc/runtime-ray/node.env").exists()

    machine.server.set({**metadata, "agent-worker-number": "1"})

    assert finish(booting)[0] == 0
    assert read_node_environment(machine)["RAY_OVERRIDE_RESOURCES"] == MEMBER["resources"]


def test_member_of_another_type_offers_half_its_cpus_and_three_fifths_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TPU_WORKER_ID", raising=False)
    monkeypatch.setattr(machine_module.os, "cpu_count", lambda: 240)
    monkeypatch.setattr(machine_module.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    member = {**MEMBER, "hosts": 1, "type": "v4-8", "resources": {"TPU": 4}}

    variables = machine_module.member_variables({"ray-member": json.dumps(member)})

    assert json.loads(variables["RAY_OVERRIDE_RESOURCES"]) == {
        "CPU": 120,
        "TPU": 4,
        "TPU-v4-8-head": 1,
        "memory": 4096 * 600,
    }


@pytest.mark.parametrize("kind", ["head", "node"])
def test_start_script_starts_ray_with_the_secrets_in_its_environment(kind: str, tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/bash\nprintf "%s\\n" "$HF_TOKEN" "$@"\n')
    ray.chmod(0o755)
    environment = tmp_path / "environment"
    environment.write_text("export HF_TOKEN=hf_x\n")
    script = units.render_start_script(sample_cluster(cloud_logging=False), MachineSettings()).replace(
        "/run/runtime-ray/environment", str(environment)
    )

    done = subprocess.run(
        ["bash", "-c", script, "start-ray", kind],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HEAD_IP": "10.64.0.2"},
        capture_output=True,
        text=True,
        check=True,
    )

    token, *arguments = done.stdout.splitlines()
    assert token == "hf_x"
    assert arguments[0] == "start"
    assert ("--head" in arguments) == (kind == "head")
    assert ("--address=10.64.0.2:6379" in arguments) == (kind == "node")
    assert "--block" in arguments


# units


def verify_units(folder: Path, unit_files: dict[str, str]) -> str:
    """Return systemd's report on the units; stand-ins replace their programs, which this machine lacks."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed; install it with `apt-get install systemd`")
    for name, text in unit_files.items():
        (folder / name).write_text(text.replace("/usr/bin/docker", "/bin/true").replace(units.MACHINE, "/bin/true"))
    (folder / "docker.service").write_text("[Service]\nExecStart=/bin/true\n")
    command = ["systemd-analyze", "verify", *(str(folder / name) for name in unit_files)]
    done = subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{folder}:"},
        text=True,
        capture_output=True,
        check=False,
    )
    return "\n".join(line for line in done.stderr.splitlines() if any(name in line for name in unit_files))


def unit_files_of(metadata: dict[str, str]) -> dict[str, str]:
    entries = json.loads(metadata["ray-files"])
    return {Path(each["path"]).name: metadata[each["key"]] for each in entries if "/systemd/system/" in each["path"]}


def test_units_are_ones_that_systemd_understands(tmp_path: Path) -> None:
    head, node = tmp_path / "head", tmp_path / "node"
    head.mkdir()
    node.mkdir()

    assert verify_units(head, unit_files_of(metadata_of(sample_cluster()))) == ""
    assert verify_units(node, unit_files_of(node_metadata(sample_cluster(), MachineSettings()))) == ""


def test_checker_of_units_finds_a_broken_one(tmp_path: Path) -> None:
    broken = units.render_head_service(sample_cluster()).replace("Restart=always", "Restart=allways")

    assert "allways" in verify_units(tmp_path, {"broken.service": broken})


def test_node_environment_reads_back_in_systemd_and_shell_alike() -> None:
    value = '{"CPU":120,"weird":"a\\\\b $HOME `id`"}'

    quoted = machine_module.quote_for_systemd(value)

    shown = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, text=True, check=True)
    assert shown.stdout == value
