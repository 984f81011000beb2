"""Stack settings made of a cluster file of Ray. tests/infra has the stack's own judgement of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.cli.main import main
from runtime.clusters.convert.cluster import MOST_BYTES, ConvertedCluster, convert_cluster, render
from runtime.errors import InvalidValue, NotPossible
from runtime.jobs.spec_file import load_yaml
from tests.cluster_files import LAB, SMALL

ZEROS = f"sha256:{'0' * 64}"
CANARY = "hf_" + "c4n4ry" * 6


def convert(text: str) -> ConvertedCluster:
    return convert_cluster(load_yaml(text))


def changed(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """LAB with another value at a path."""
    document: dict[str, Any] = load_yaml(LAB)
    table = document
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    return document


def lines_of(made: ConvertedCluster) -> dict[tuple[str, str], str]:
    return {(each.where, each.what): each.next for each in made.notes}


def test_cluster_file_becomes_the_settings_of_a_stack() -> None:
    settings = convert(LAB).settings

    variables = {"variables": {"TPU_LOG_DIR": "disabled"}}
    container = {"container": {"shm_size": "200g", "options": ["--ulimit=nproc=4096:8192"]}}
    assert settings == {
        "project": "lab-1234",
        "region": "us-central2",
        "zone": "us-central2-b",
        "network": {"cidr": "10.64.0.0/20"},
        "records": {"location": "us-central2"},
        "buckets": {"lab-us-central2": {"existing": "lab-us-central2", "writers": ["clusters"]}},
        "registries": {
            "images": {
                "regions": ["us-central2"],
                "existing": {"us-central2": "projects/lab-1234/locations/us-central2/repositories/lab"},
            }
        },
        "secrets": {
            "hf-token": {"env": "HF_TOKEN", "existing": "projects/lab-1234/secrets/HF_TOKEN"},
            "openai-key": {"env": "OPENAI_API_KEY", "existing": "projects/other-5678/secrets/openai_key"},
        },
        "heads": {
            "main": {
                "machine_type": "n2-standard-8",
                "disk_gb": 200,
                "image": f"us-central2-docker.pkg.dev/lab-1234/lab/lab_cluster@{ZEROS}",
                "environment": ["hf-token", "openai-key"],
                "variables": {
                    "BUCKET": "lab-us-central2",
                    "GOOGLE_CLOUD_PROJECT": "lab-1234",
                    "LAB_PREFIX": "gs://lab-us-central2",
                },
                "setup": "mkdir -p /mnt/cache\n",
                "container": {"mounts": ["/tmp:/tmp"]},
                "idle_minutes": 15,
                "pools": {
                    "tpu-worker": {
                        "accelerator": "v4-8",
                        "runtime_version": "tpu-ubuntu2204-base",
                        "capacity": "preemptible",
                        "min": 4,
                        "max": 512,
                        "cpus": 120,
                        **variables,
                        **container,
                    },
                    "steady": {
                        "accelerator": "v4-8",
                        "runtime_version": "tpu-ubuntu2204-base",
                        "capacity": "on_demand",
                        "min": 0,
                        "max": 8,
                        "cpus": 120,
                        **variables,
                        **container,
                    },
                },
            }
        },
    }


@pytest.mark.parametrize(
    ("where", "what", "next_step"),
    [
        ("docker.worker_run_options", "-v /var/run/docker.sock:/var/run/docker.sock", "root of the machine"),
        ("docker.worker_run_options", "-v /etc/passwd:/etc/passwd:ro", "a container sees folders of its machine in"),
        ("docker.worker_run_options", "-e TPU_WORKER_ID", "set it in `variables`"),
        ("docker.worker_run_options", "RAY_TPU_MAX_CONCURRENT_ACTIVE_CONNECTIONS=64", "is left out"),
        ("docker.head_run_options", "--privileged", "no rights over the machine"),
        (
            "initialization_commands[3]",
            "sudo chmod 666 /var/run/docker.sock",
            "makes every program of the machine root",
        ),
        ("setup_commands[4]", "gcloud secrets versions access 3", "the newest enabled version is read"),
        ("setup_commands[5]", "RAY_CLUSTER_PUBLIC_KEY", "keys for SSH are the head's own"),
        ("setup_commands[7]", "gcsfuse --only-dir data", "read and write gs:// URLs"),
        ("setup_commands[8]", 'pip install "lab[all]"', "put it into the image"),
        ("file_mounts", "/home/ray/tool", "put the files into the image"),
        (
            "available_node_types.tpu_slice_v4_16",
            "v4-16",
            "`runtime cluster add v4-16 --count 1 --capacity preemptible --runtime-version tpu-ubuntu2204-base`",
        ),
        ("available_node_types.tpu_slice_v4_16.resources.CPU", "120", "half of its host's"),
        ("available_node_types.head_default.min_workers", "1", "a cluster has one head"),
        ("available_node_types.steady.resources", "TPU: 8", "4 on each host of a v4-8"),
        ("available_node_types.tpu_slice_v4_16.resources", "TPU: 16", "4 on each host of a v4-16"),
        (
            "available_node_types.kept",
            "v4-8",
            "`runtime cluster add v4-8 --count 2 --capacity reserved --runtime-version tpu-ubuntu2204-base`",
        ),
        ("available_node_types.tpu_worker.resources", "fast_disk: 1", "`labels` mark its nodes"),
        (
            "available_node_types.head_default.node_config.disks[0].initializeParams.sourceImage",
            "family/ubuntu-2204-lts",
            "is no version of an image",
        ),
        ("auth", "ssh_user", "OS Login"),
    ],
)
def test_each_thing_that_is_left_out_is_said_with_its_next_step(where: str, what: str, next_step: str) -> None:
    document = load_yaml(LAB)
    types = document["available_node_types"]
    types["head_default"]["min_workers"] = 1
    types["steady"]["resources"]["TPU"], types["tpu_slice_v4_16"]["resources"]["TPU"] = 8, 16

    found = [each for each in convert_cluster(document).notes if each.where == where and what in each.what]

    assert any(next_step in each.next for each in found), [each.line() for each in found]


@pytest.mark.parametrize(
    "path",
    [
        ("available_node_types", "tpu_slice_v4_16"),
        ("available_node_types", "tpu_slice_v4_16", "node_config"),
        ("available_node_types", "tpu_slice_v4_16", "resources"),
        ("available_node_types", "kept", "node_config", "schedulingConfig"),
        ("available_node_types", "head_default", "node_config", "disks", 0),
        ("available_node_types", "head_default", "node_config", "disks", 0, "initializeParams"),
    ],
)
def test_key_that_no_stack_has_is_said_wherever_it_is(path: tuple[Any, ...]) -> None:
    document = load_yaml(LAB)
    table = document
    for key in path:
        table = table[key]
    table["frobnicate"] = "zzz"

    made = convert_cluster(document)

    assert [each.what for each in made.notes if each.where.endswith(".frobnicate")] == ["zzz"]


@pytest.mark.parametrize("scheduling", [None, {"spot": True}, {"reserved": True}])
def test_command_for_what_no_pool_takes_is_one_of_this_program(
    scheduling: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ("available_node_types", "tpu_slice_v4_16", "node_config", "schedulingConfig")
    [command] = [
        each.next.partition("`")[2].rstrip("`")
        for each in convert_cluster(changed(path, scheduling)).notes
        if each.where == "available_node_types.tpu_slice_v4_16"
    ]

    code = main([*command.split()[1:], "--within", "never"])

    # All its words are known; the last one, which is not its own, is refused.
    assert (code, "`never` is no valid --within" in capsys.readouterr().err) == (2, True)


def test_number_of_chips_that_the_type_has_is_no_difference() -> None:
    assert [each for each in convert(LAB).notes if each.what.startswith("TPU: ")] == []


@pytest.mark.parametrize("form", ["{{.Names}}", "{{json .}}", "{{ .ID }} {{end}}", "{{range .Ports}}", "%{http_code}"])
def test_format_of_a_command_makes_no_template(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "c.yaml"
    cluster.write_text(LAB.replace("  - mkdir -p /mnt/cache\n", f"  - docker ps --format '{form}'\n"))

    assert main(["convert", "marin", str(cluster)]) == 0
    assert f"docker ps --format '{form}'" in capsys.readouterr().out


def test_every_command_and_option_is_carried_or_said() -> None:
    made = convert(LAB)
    document = load_yaml(LAB)
    text = render(made)

    said = {each.where for each in made.notes}
    carried = {"initialization_commands[4]", "setup_commands[0]", "setup_commands[6]"}
    commands = {
        f"{key}[{index}]"
        for key in ("initialization_commands", "setup_commands")
        for index in range(len(document[key]))
    }
    assert commands - said == carried
    assert all(f"# - {each.line()}\n" in text for each in made.notes)


def test_small_file_has_rays_defaults_and_room_for_all_its_nodes() -> None:
    made = convert(SMALL)
    head = made.settings["heads"]["main"]

    assert made.settings["network"] == {"cidr": "10.64.0.0/20"}
    assert made.settings["overrides"] == {"images": ["ghcr.io/lab"]}
    assert (head["image"], head["idle_minutes"], head["disk_gb"]) == (f"ghcr.io/lab/levant-cluster@{ZEROS}", 5, 50)
    assert {name: (each["capacity"], each["min"], each["max"]) for name, each in head["pools"].items()} == {
        "one": ("on_demand", 0, 1024),
        "four": ("spot", 0, 1024),
        "eight": ("on_demand", 0, 1024),
    }
    assert ("available_node_types.cpu", "n2-standard-32") in lines_of(made)
    assert ("available_node_types.one.max_workers", "6000") in lines_of(made)


def test_image_with_a_digest_keeps_it_and_no_image_is_said() -> None:
    digest = f"sha256:{'a' * 64}"
    pinned = convert_cluster(changed(("docker", "image"), f"docker.io/rayproject/ray:2.60@{digest}"))
    none = convert_cluster(changed(("docker",), {}))

    assert pinned.settings["heads"]["main"]["image"] == f"docker.io/rayproject/ray@{digest}"
    assert pinned.settings.keys() & {"registries", "overrides"} == set()
    assert none.settings["heads"]["main"]["image"].startswith("us-central2-docker.pkg.dev/lab-1234/lab-us-central2/")
    assert none.settings["registries"] == {"images": {"repository": "lab-us-central2"}}


def test_project_of_a_domain_is_written_as_google_writes_it() -> None:
    document = changed(("provider", "project_id"), "example.com:lab")
    document["docker"]["image"] = "us-central2-docker.pkg.dev/example.com/lab/images/ray:1"
    own = convert_cluster(document)
    del document["docker"]["image"]
    none = convert_cluster(document)

    (existing,) = own.settings["registries"]["images"]["existing"].values()
    assert existing == "projects/example.com:lab/locations/us-central2/repositories/images"
    assert none.settings["heads"]["main"]["image"].startswith("us-central2-docker.pkg.dev/example.com/lab/")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("docker", "worker_run_options"), [f"-e HF_TOKEN={CANARY}"]),
        (("docker", "worker_run_options"), [f"-e ANY={CANARY}"]),
        (("docker", "worker_run_options"), ["--unknown", CANARY]),
        (("setup_commands",), [f"export HF_TOKEN={CANARY}"]),
        (("setup_commands",), [f"echo {CANARY} > ~/.cache/huggingface/token"]),
        (("initialization_commands",), [f"curl -H 'Authorization: Bearer {CANARY}' https://lab.example"]),
        (("file_mounts",), {"/token": CANARY}),
        (("cluster_name",), CANARY),
        (("available_node_types", "tpu_worker", "resources"), {CANARY: 1}),
    ],
)
def test_value_of_a_secret_in_the_file_is_in_nothing_that_is_made(path: tuple[str, ...], value: Any) -> None:
    made = convert_cluster(changed(path, value))

    assert CANARY not in render(made)
    assert "holds what looks like a secret" in render(made) or "runtime secrets put" in render(made)


def test_value_of_a_secret_at_a_place_that_is_carried_is_refused() -> None:
    document = changed(("available_node_types", "steady", "node_config", "runtimeVersion"), CANARY)

    with pytest.raises(NotPossible, match="looks like the value of a secret") as refused:
        convert_cluster(document)
    assert CANARY not in refused.value.render()


def test_text_with_line_ends_stays_in_its_comment() -> None:
    hostile = "pip install x\nconfig: {}\u2028config: {}\x85config:\r\n  research-runtime:project: other\x1b[2J"

    text = render(convert_cluster(changed(("setup_commands",), [hostile])))

    assert yaml.safe_load(text)["config"]["research-runtime:project"] == "lab-1234"
    assert sum("research-runtime:project" in line for line in text.splitlines() if not line.startswith("#")) == 1
    assert "\x1b" not in text


def test_same_file_gives_the_same_text_that_reads_back_as_the_settings() -> None:
    first, second = render(convert(LAB)), render(convert(LAB))

    assert first == second
    read = yaml.safe_load(first)["config"]
    assert read.pop("pulumi:disable-default-providers") == ["*"]
    assert {key.removeprefix("research-runtime:"): each for key, each in read.items()} == convert(LAB).settings


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("provider",), [], "provider"),
        (("provider", "availability_zone"), "us-central2-b,us-central2-c", "provider.availability_zone"),
        (("provider", "project_id"), None, "provider.project_id"),
        (("docker",), "image", "docker"),
        (("docker", "image"), "An Image", "docker.image"),
        (("docker", "worker_run_options"), "-v /tmp:/tmp", "docker.worker_run_options"),
        (("setup_commands",), [["nested"]], "setup_commands"),
        (("setup_commands",), ["x" * 20_000], "setup_commands[0]"),
        (("head_node_type",), "absent", "head_node_type"),
        (("available_node_types",), None, "head_node_type"),
        (("available_node_types", "steady"), "x", "available_node_types.steady"),
        (("available_node_types", "steady", "max_workers"), "many", "available_node_types.steady.max_workers"),
        (("available_node_types", "steady", "max_workers"), True, "available_node_types.steady.max_workers"),
        (("available_node_types", "steady", "min_workers"), -1, "available_node_types.steady.min_workers"),
        (("available_node_types", "steady", "min_workers"), float("inf"), "available_node_types.steady.min_workers"),
        (("available_node_types", "steady", "node_config", "runtimeVersion"), None, "available_node_types.steady"),
        (("available_node_types", "tpu-worker"), {"node_config": {"acceleratorType": "v4-8"}}, "available_node_types"),
    ],
)
def test_wrong_value_is_named_with_its_place(path: tuple[str, ...], value: Any, field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        convert_cluster(changed(path, value))

    assert refused.value.field.startswith(field)


@pytest.mark.parametrize("document", [None, [], "text", 3, {}, {"kind": "ReplicaSet"}, {"cluster_name": "x"}])
def test_file_of_another_kind_is_refused(document: object) -> None:
    with pytest.raises(NotPossible, match="no cluster file of Ray"):
        convert_cluster(document)


def test_cluster_of_another_provider_is_refused() -> None:
    with pytest.raises(NotPossible, match="provider `aws`"):
        convert_cluster(changed(("provider", "type"), "aws"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"cluster_name: [", "is no YAML: line 1"),
        (b"\xff\xfe", "it is no text"),
        (b"cluster_name: {{NAME}}\n", "is a template"),
        (b"cluster_name: '{{ NAME | lower }}-{{.Names}}'\n", "is a template"),
        (b"cluster_name: {{ cluster.name }}\n", "is a template"),
        (b"{% if tpu %}\ncluster_name: x\n{% endif %}\n", "is a template"),
        (b"a: 1\n---\nb: 2\n", "is no YAML"),
        (b"a: 1\na: 2\n", "`a` is there twice"),
        (b"x" * (MOST_BYTES + 1), "is larger than 1,048,576 bytes"),
        (b"[" * 100_000, "is no YAML"),
        (b"a: &a [x]\n" + b"".join(b"k%d: &k%d [%s]\n" % (n, n, b"*a," * 9) for n in range(3)), "no cluster file"),
        (b"!!python/object/apply:os.system ['true']", "is no YAML"),
    ],
)
def test_file_that_cannot_be_read_is_refused_in_one_sentence(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)

    assert main(["convert", "marin", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_command_writes_the_stack_file_once_and_counts_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, stack = tmp_path / "c.yaml", tmp_path / "Pulumi.lab.yaml"
    cluster.write_text(LAB)

    assert main(["convert", "marin", str(cluster)]) == 0
    shown = capsys.readouterr()
    assert main(["convert", "marin", str(cluster), "-o", str(stack)]) == 0
    assert main(["convert", "marin", str(cluster), "-o", str(stack)]) == 2
    for nowhere in (tmp_path / "none" / "x.yaml", cluster / "x.yaml"):
        capsys.readouterr()
        assert main(["convert", "marin", str(cluster), "-o", str(nowhere)]) == 2
        assert f"`{nowhere.parent}` is no folder" in capsys.readouterr().err

    assert stack.read_text() == shown.out == render(convert(LAB))
    assert f"{len(convert(LAB).notes)} things of `{cluster}` differ or are left out" in shown.err
