"""Converts the older practice of several seeds on shared GPUs: a ReplicaSet template and a list RUNS become one job array.

A ReplicaSet starts finished pods again, for ever; in the job each seed is a run that ends once.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runtime.errors import InvalidValue, NotPossible
from runtime.jobs.spec_file import describe_syntax
from runtime.units import parse_size

GPU_VARIABLES: Final = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
HOSTNAME: Final = "kubernetes.io/hostname"
_KEYS: Final = ("name", "gpu_id", "node", "replicas", "cmd")
_CONTAINER: Final = (
    *("name", "image", "command", "args", "env", "volumeMounts"),
    *("tty", "stdin", "imagePullPolicy", "resources"),
)
_POD: Final = ("containers", "volumes", "nodeSelector", "imagePullSecrets", "serviceAccountName", "restartPolicy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsEntry:
    """One entry of RUNS: `replicas` pods of one command on one GPU."""

    name: str
    gpu_id: int
    node: str
    replicas: int
    cmd: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedJob:
    spec: Mapping[str, Any]
    """A job file, as data."""
    lines: tuple[Mapping[str, Any], ...]
    """Parameters of each index if the runs differ in more than their seed; the spec's `array.file`."""
    gpus: Mapping[str, int]
    """Nodes and GPUs that the target has to name."""
    notes: tuple[str, ...]
    """The changes, and the parts that were left out."""


def read_runs(text: str, *, source: str) -> list[dict[str, Any]]:
    """The list RUNS of a launch script, read and never executed, or a YAML list of the same entries."""
    if source.endswith(".py"):
        try:
            tree = ast.parse(text)
        except SyntaxError as problem:
            raise NotPossible(f"`{source}` is no Python: {problem.msg}, line {problem.lineno}") from None
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(each, ast.Name) and each.id == "RUNS" for each in node.targets
            ):
                try:
                    return _checked(ast.literal_eval(node.value), source)
                except ValueError:
                    raise NotPossible(
                        f"RUNS in `{source}` is computed, and only a list that is written out can be read",
                        hint="write it out, or into a YAML file",
                    ) from None
        raise NotPossible(f"`{source}` has no list RUNS")
    import yaml

    try:
        return _checked(yaml.safe_load(text), source)
    except yaml.YAMLError as problem:
        raise NotPossible(f"`{source}` is no YAML: {describe_syntax(problem)}") from None


def _checked(value: object, source: str) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, dict) for each in value) or not value:
        raise NotPossible(f"`{source}` holds no list of runs", hint=f"each has {', '.join(_KEYS)}")
    for number, each in enumerate(value):
        unknown = sorted(set(each) - set(_KEYS))
        if unknown:
            raise InvalidValue(f"RUNS[{number}]", unknown[0], f"the keys {', '.join(_KEYS)}")
    return [dict(each) for each in value]


def convert(
    template: object, runs: Sequence[Mapping[str, Any]] = (), *, lines_file: str = "runs.jsonl"
) -> ConvertedJob:
    """The job array of a ReplicaSet and its runs; of the ReplicaSet alone without any."""
    template = _read_template(template)
    pod = template["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    base = _run_of_template(template, pod, container)
    all_runs = [_read_run(number, each, base) for number, each in enumerate(runs)] or [base]
    notes = list(_notes(pod, container, all_runs))
    sharing = max(_sharing(all_runs).values())
    count = sum(each.replicas for each in all_runs)
    spec: dict[str, Any] = {
        "name": _name(str(template.get("metadata", {}).get("name", "runs"))),
        "image": container.get("image"),
        "code": {"mode": "image"},
    }
    commands = {each.cmd for each in all_runs}
    lines: tuple[Mapping[str, Any], ...] = ()
    if len(commands) == 1:
        spec["command"] = list(all_runs[0].cmd)
        spec["array"] = {"seeds": count}
    else:
        prefixes = {each[:-1] for each in commands}
        if len(prefixes) != 1:
            raise NotPossible(
                "the runs' commands differ in more than their last word", hint="write each as one line of shell: cmd"
            )
        spec["command"] = [*prefixes.pop(), "{cmd}"]
        spec["array"] = {"file": lines_file}
        lines = tuple(
            {"run": each.name, "seed": seed, "cmd": each.cmd[-1]} for each in all_runs for seed in range(each.replicas)
        )
    if env := _env(container, notes):
        spec["env"] = env
    if mounts := _mounts(pod, container):
        spec["mounts"] = mounts
    # Rounded down, so that as many runs share a GPU as before.
    share = 1 if sharing == 1 else int(10000 / sharing) / 10000
    spec["resources"] = {"gpus": {"count": share}, **_memory(container)}
    nodes = sorted({each.node for each in all_runs if each.node})
    if nodes:
        spec["placement"] = {"nodes": nodes}
    gpus = {node: 1 + max(each.gpu_id for each in all_runs if each.node == node) for node in nodes}
    return ConvertedJob(
        spec={key: value for key, value in spec.items() if value is not None},
        lines=lines,
        gpus=gpus,
        notes=tuple(notes),
    )


def render(converted: ConvertedJob) -> str:
    """The job file, with what changed above it."""
    import yaml

    above = [f"# {each}" for each in converted.notes]
    if converted.gpus:
        table = ", ".join(f'"{node}" = {count}' for node, count in sorted(converted.gpus.items()))
        above.append(f"# the target needs: gpus = {{ {table} }}, or as many as each node has")
    return "\n".join([*above, yaml.safe_dump(dict(converted.spec), sort_keys=False, width=110)])


def render_lines(converted: ConvertedJob) -> str:
    return "".join(json.dumps(line) + "\n" for line in converted.lines)


# reading


# The parts of a template that are read, with their types; the names are required.
_SCALAR: Final = (str, int, float)
_SHAPE: Final[Mapping[str, Any]] = {
    "metadata": {},
    "spec": {
        "template": {
            "spec": {
                "nodeSelector": {},
                "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
                "containers": [
                    {
                        "command": [_SCALAR],
                        "args": [_SCALAR],
                        "env": [{"name": str, "value": _SCALAR}],
                        "volumeMounts": [{"name": str, "mountPath": str}],
                        "resources": {"limits": {"memory": _SCALAR}},
                    }
                ],
            }
        }
    },
}


def _read_template(template: object) -> dict[str, Any]:
    """The template, with everything that is read of it in its place."""
    kind = template.get("kind") if isinstance(template, Mapping) else template
    if not isinstance(template, Mapping) or kind not in ("ReplicaSet", "Deployment", "ReplicationController"):
        raise InvalidValue("kind", kind, "ReplicaSet", hint="the file that was given to `kubectl apply`")
    found: dict[str, Any] = _shaped(template, _SHAPE, "")
    containers = found["spec"]["template"]["spec"]["containers"]
    if len(containers) != 1:
        raise NotPossible(f"the template has {len(containers)} containers, expected one")
    return found


def _shaped(value: object, shape: Any, where: str) -> Any:
    if isinstance(shape, dict):
        if not isinstance(value, Mapping | None):
            raise InvalidValue(where, value, "a table")
        found = {str(key): each for key, each in (value or {}).items() if each is not None}
        for name, inner in shape.items():
            place = f"{where}.{name}".lstrip(".")
            if name in found or name in ("metadata", "spec", "template", "containers"):
                found[name] = _shaped(found.get(name), inner, place)
            elif inner is str:
                raise InvalidValue(place, None, "text")
        return found
    if isinstance(shape, list):
        if not isinstance(value, list | None):
            raise InvalidValue(where, value, "a list")
        return [_shaped(each, shape[0], f"{where}[{number}]") for number, each in enumerate(value or [])]
    if not isinstance(value, shape):
        raise InvalidValue(where, value, "text")
    return value


def _run_of_template(template: Mapping[str, Any], pod: Mapping[str, Any], container: Mapping[str, Any]) -> RunsEntry:
    gpus = {each.get("value") for each in container.get("env", ()) if each.get("name") in GPU_VARIABLES}
    if len(gpus) > 1:
        raise NotPossible(
            "the template's two GPU variables differ", facts=[f"{', '.join(GPU_VARIABLES)}: {sorted(map(str, gpus))}"]
        )
    return RunsEntry(
        name=str(template.get("metadata", {}).get("name", "runs")),
        gpu_id=_whole("gpu_id", next(iter(gpus), 0) or 0, least=0),
        node=str(pod.get("nodeSelector", {}).get(HOSTNAME, "")),
        replicas=_whole("replicas", template.get("spec", {}).get("replicas", 1), least=1),
        cmd=tuple(str(word) for word in [*container.get("command", ()), *container.get("args", ())]),
    )


def _read_run(number: int, value: Mapping[str, Any], base: RunsEntry) -> RunsEntry:
    where = f"RUNS[{number}]"
    cmd = base.cmd
    if "cmd" in value:
        said = value["cmd"]
        cmd = tuple(str(word) for word in said) if isinstance(said, list | tuple) else ("/bin/bash", "-c", str(said))
    if not cmd:
        raise InvalidValue(f"{where}.cmd", None, "a command, here or in the template")
    return RunsEntry(
        name=str(value.get("name", f"run-{number}")),
        gpu_id=_whole(f"{where}.gpu_id", value.get("gpu_id", base.gpu_id), least=0),
        node=str(value.get("node", base.node)),
        replicas=_whole(f"{where}.replicas", value.get("replicas", base.replicas), least=1),
        cmd=cmd,
    )


def _whole(field: str, value: object, *, least: int) -> int:
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal() or int(text) < least:
        raise InvalidValue(field, value, f"a whole number from {least} on")
    return int(text)


def _sharing(runs: Sequence[RunsEntry]) -> Counter[tuple[str, int]]:
    """How many pods each GPU had at once."""
    found = Counter[tuple[str, int]]()
    for each in runs:
        found[each.node, each.gpu_id] += each.replicas
    return found


def _env(container: Mapping[str, Any], notes: list[str]) -> dict[str, str]:
    found = {}
    for each in container.get("env", ()):
        if each["name"] in GPU_VARIABLES:
            continue
        if "value" not in each:
            notes.append(
                f"the variable {each['name']} comes from the cluster: name it in `secrets` (kubernetes://SECRET/KEY)"
            )
            continue
        found[each["name"]] = str(each["value"])
    return found


def _mounts(pod: Mapping[str, Any], container: Mapping[str, Any]) -> list[dict[str, str]]:
    claims = {
        each["name"]: each["persistentVolumeClaim"]["claimName"]
        for each in pod.get("volumes", ())
        if "persistentVolumeClaim" in each
    }
    return [
        {
            "source": f"claim://{claims[each['name']]}" + (f"/{each['subPath']}" if each.get("subPath") else ""),
            "target": each["mountPath"],
            "mode": "ro" if each.get("readOnly") else "rw",
        }
        for each in container.get("volumeMounts", ())
        if each["name"] in claims
    ]


def _memory(container: Mapping[str, Any]) -> dict[str, str]:
    limit = container.get("resources", {}).get("limits", {}).get("memory")
    if limit is None:
        return {}
    text = str(limit)
    unit = {"Ki": "KiB", "Mi": "MiB", "Gi": "GiB", "Ti": "TiB"}.get(text[-2:])
    text = f"{text[:-2]}{unit}" if unit else text
    try:
        parse_size(text)
    except InvalidValue:
        raise InvalidValue("resources.limits.memory", limit, "a size such as 16Gi") from None
    return {"memory": text}


def _name(text: str) -> str:
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in text.lower()).strip("-")
    return kept[:63].strip("-") or "runs"


def _notes(pod: Mapping[str, Any], container: Mapping[str, Any], runs: Sequence[RunsEntry]) -> list[str]:
    notes = ["each seed is a run that ends once; a ReplicaSet started what had finished again"]
    if (
        str(container.get("image", "")).endswith(":latest")
        or ":" not in str(container.get("image", "")).rpartition("/")[2]
    ):
        notes.append(f"the image `{container.get('image')}` may change between two runs: name a digest")
    if container.get("tty") or container.get("stdin"):
        notes.append("left out: tty and stdin; the log has what is printed")
    if "resources" not in container:
        notes.append("set resources.memory: pods that share a node had no limit")
    volumes = [each["name"] for each in pod.get("volumes", ()) if "persistentVolumeClaim" not in each]
    notes += [f"left out: the volume `{name}`, which is no claim" for name in volumes]
    notes += [f"left out: `{name}` of the container" for name in sorted(set(container) - set(_CONTAINER))]
    notes += [f"left out: `{name}` of the pod" for name in sorted(set(pod) - set(_POD))]
    selector = sorted(set(pod.get("nodeSelector", {})) - {HOSTNAME})
    notes += [f"left out: the node label `{name}`; placement.selector takes it" for name in selector]
    sharing = set(_sharing(runs).values())
    if len(sharing) > 1:
        notes.append(f"GPUs had {', '.join(map(str, sorted(sharing)))} pods each; now all have {max(sharing)} slots")
    return notes
