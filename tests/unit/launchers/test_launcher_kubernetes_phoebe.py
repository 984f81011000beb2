"""ReplicaSets and lists of runs as job arrays."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.cli.main import main
from runtime.errors import InvalidValue, NotPossible, RequestRefused
from runtime.jobs.spec import parse_spec
from runtime.jobs.spec_file import read_spec_file
from runtime.launchers.kubernetes.convert import convert, read_runs

TEMPLATE: dict[str, Any] = yaml.safe_load(
    """
apiVersion: apps/v1
kind: ReplicaSet
metadata: {name: worker-pods, labels: {tier: worker-set}}
spec:
  replicas: 4
  selector: {matchLabels: {tier: worker-set}}
  template:
    metadata: {labels: {tier: worker-set}}
    spec:
      nodeSelector: {kubernetes.io/hostname: node1}
      volumes:
        - name: data
          persistentVolumeClaim: {claimName: persistent-claim}
      containers:
        - name: worker-container
          tty: true
          stdin: true
          volumeMounts: [{name: data, mountPath: /mnt}]
          env:
            - {name: NVIDIA_VISIBLE_DEVICES, value: "0"}
            - {name: CUDA_VISIBLE_DEVICES, value: "0"}
            - {name: MODE, value: fast}
          image: registry.example/lab/node:latest
          command: [/bin/bash, -c, ./run.bash -b random]
"""
)
SCRIPT = """
import subprocess
RUNS = [
    {"name": "a", "gpu_id": 0, "node": "node1", "replicas": 4, "cmd": "./run.bash -b sac"},
    {"name": "b", "gpu_id": 1, "node": "node1", "replicas": 4, "cmd": "./run.bash -b sac"},
    {"name": "c", "gpu_id": 0, "node": "node2", "replicas": 4, "cmd": "./run.bash -b sac"},
]
raise SystemExit("never executed")
"""


def test_twelve_seeds_on_three_gpus_become_one_array_of_seeds() -> None:
    made = convert(TEMPLATE, read_runs(SCRIPT, source="launch.py"))

    assert made.spec == {
        "name": "worker-pods",
        "image": "registry.example/lab/node:latest",
        "code": {"mode": "image"},
        "command": ["/bin/bash", "-c", "./run.bash -b sac"],
        "array": {"seeds": 12},
        "env": {"MODE": "fast"},
        "mounts": [{"source": "claim://persistent-claim", "target": "/mnt", "mode": "rw"}],
        "resources": {"gpus": {"count": 0.25}},
        "placement": {"nodes": ["node1", "node2"]},
    }
    assert (made.lines, made.gpus) == ((), {"node1": 2, "node2": 1})
    assert made.notes == (
        "each seed is a run that ends once; a ReplicaSet started what had finished again",
        "the image `registry.example/lab/node:latest` may change between two runs: name a digest",
        "left out: tty and stdin; the log has what is printed",
        "set resources.memory: pods that share a node had no limit",
    )
    parse_spec(made.spec)


def test_template_alone_is_as_many_seeds_as_it_has_pods() -> None:
    made = convert(TEMPLATE)

    assert made.spec["array"] == {"seeds": 4}
    assert made.spec["command"] == ["/bin/bash", "-c", "./run.bash -b random"]


def test_runs_with_commands_of_their_own_become_lines_of_parameters() -> None:
    runs = [{"name": "x", "cmd": "one"}, {"name": "y", "cmd": "two", "gpu_id": 3, "replicas": 1}]

    made = convert(TEMPLATE, runs)

    assert made.spec["command"] == ["/bin/bash", "-c", "{cmd}"]
    assert made.spec["array"] == {"file": "runs.jsonl"}
    assert [(line["run"], line["seed"], line["cmd"]) for line in made.lines] == [
        ("x", 0, "one"),
        ("x", 1, "one"),
        ("x", 2, "one"),
        ("x", 3, "one"),
        ("y", 0, "two"),
    ]
    assert "GPUs had 1, 4 pods each; now all have 4 slots" in made.notes


def test_three_pods_on_a_gpu_still_fit_three() -> None:
    template = copy.deepcopy(TEMPLATE)
    template["spec"]["replicas"] = 3

    count = convert(template).spec["resources"]["gpus"]["count"]

    assert int(1 / count) == 3


def test_what_cannot_be_kept_is_said() -> None:
    template = copy.deepcopy(TEMPLATE)
    pod = template["spec"]["template"]["spec"]
    pod["hostNetwork"] = True
    pod["nodeSelector"]["pool"] = "gpu"
    pod["volumes"].append({"name": "host", "hostPath": {"path": "/x"}})
    pod["containers"][0]["env"].append({"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}})
    pod["containers"][0]["livenessProbe"] = {}

    notes = convert(template).notes

    assert {
        "left out: the volume `host`, which is no claim",
        "left out: `livenessProbe` of the container",
        "left out: `hostNetwork` of the pod",
        "left out: the node label `pool`; placement.selector takes it",
        "the variable KEY comes from the cluster: name it in `secrets` (kubernetes://SECRET/KEY)",
    } <= set(notes)


@pytest.mark.parametrize(
    ("text", "source", "error"),
    [
        ("RUNS = [dict(name=n) for n in x]", "l.py", NotPossible),
        ("OTHER = []", "l.py", NotPossible),
        ("RUNS = [", "l.py", NotPossible),
        ("RUNS = [{'nmae': 'x'}]", "l.py", InvalidValue),
        ("- 1", "runs.yaml", NotPossible),
        ("[", "runs.yaml", NotPossible),
        ("[]", "runs.yaml", NotPossible),
    ],
)
def test_list_that_cannot_be_read_is_refused(text: str, source: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_runs(text, source=source)


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (("kind",), "Pod", InvalidValue),
        (("spec", "replicas"), 0, InvalidValue),
        (("spec", "template", "spec", "containers"), [], NotPossible),
        (("spec", "template", "spec", "containers", 0, "env", 0, "value"), "3", NotPossible),
    ],
)
def test_template_that_cannot_be_used_is_refused(path: tuple[Any, ...], value: object, error: type[Exception]) -> None:
    template = copy.deepcopy(TEMPLATE)
    place: Any = template
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value

    with pytest.raises(error):
        convert(template)


def test_command_writes_files_that_launch_reads_and_overwrites_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(TEMPLATE))
    (tmp_path / "l.py").write_text(SCRIPT.replace('"./run.bash -b sac"', '"./run.bash -b mpc"', 1))
    words = ["convert", "phoebe", str(tmp_path / "t.yaml"), str(tmp_path / "l.py")]

    assert main(words) == 2
    assert "takes a second file" in capsys.readouterr().err
    assert main([*words, "--to", str(tmp_path / "jobs")]) == 0
    spec = parse_spec(read_spec_file(tmp_path / "jobs" / "job.yaml"))
    assert spec.array is not None
    assert spec.array.file == "runs.jsonl"
    assert len((tmp_path / "jobs" / "runs.jsonl").read_text().splitlines()) == 12
    assert 'gpus = { "node1" = 2, "node2" = 1 }' in (tmp_path / "jobs" / "job.yaml").read_text()
    assert main([*words, "--to", str(tmp_path / "jobs")]) == 2
    assert "is there already" in capsys.readouterr().err


def test_command_prints_a_job_of_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(TEMPLATE))

    assert main(["convert", "phoebe", str(tmp_path / "t.yaml")]) == 0
    assert parse_spec(yaml.safe_load(capsys.readouterr().out)).array is not None
    assert main(["convert", "phoebe", str(tmp_path / "absent.yaml")]) == 2


def paths_of(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from paths_of(each, (*path, key))


@pytest.mark.parametrize("wrong", [None, "text", 7, True, [], {}, [None], ["a"], {"a": 1}], ids=repr)
def test_template_that_is_wrong_anywhere_is_converted_or_refused_in_words(wrong: object) -> None:
    refused = 0
    for path in paths_of(TEMPLATE):
        template = {"": copy.deepcopy(TEMPLATE)}
        place: Any = template
        for key in ("", *path)[:-1]:
            place = place[key]
        place[("", *path)[-1]] = wrong
        try:
            parse_spec(dict(convert(template[""]).spec), source="a conversion")
        except RequestRefused:
            refused += 1

    assert refused > 0
