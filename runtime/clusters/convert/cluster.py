"""Makes stack settings of a cluster file of `ray up` for Google's TPUs.

The stack file is complete: what it lacks stands at its top, each with a next step. `python -m infra check` judges it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from runtime.clusters.convert.commands import SetUp, read_container_commands, read_machine_commands
from runtime.clusters.convert.container import ContainerSettings, read_options
from runtime.clusters.convert.notes import (
    LONGEST_TEXT,
    Note,
    Notes,
    quote,
    read_count,
    read_table,
    read_text,
    read_texts,
)
from runtime.clusters.nodes import count_chips, count_hosts
from runtime.errors import InvalidValue, NotPossible
from runtime.outputs import NO_DIGEST, PROJECT_ID, image_path
from runtime.secret_detection import has_known_form
from runtime.yaml_text import dump_yaml

MOST_BYTES: Final = 1 << 20
"""Size of the largest cluster file that is read."""
HEAD: Final = "main"
PREFIX: Final = "research-runtime:"
_IMAGE: Final = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9._-]*(?::[0-9]{1,5}(?=/))?(?:/[a-z0-9][a-z0-9._-]*)+)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_GOOGLES: Final = re.compile(
    r"(?P<region>[a-z0-9-]+)-docker\.pkg\.dev/(?P<project>(?:[^/]+\.[^/]+/)?[^/]+)/(?P<repository>[^/]+)/.+"
)
_BOOT_IMAGE: Final = re.compile(
    r"(?:https://www\.googleapis\.com/compute/v1/)?(projects/[^/]+/global/images/[^/]+-v[0-9]{8})"
)
_POOL: Final = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_ZONE: Final = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z0-9]+")
_MOST_NODES: Final = 1024
"""Ray reads one page of nodes."""
_FIRST_LENGTH: Final = 20
_RAYS_IDLE_MINUTES: Final = 5

_INSTEAD: Final[Mapping[str, str]] = {
    "auth": "people log in with OS Login, and the head makes its own key for its nodes",
    "upscaling_speed": "is 4.0 for all clusters",
    "file_mounts": "put the files into the image, or read them from a bucket; jobs bring their code themselves",
    "cluster_synced_files": "put the files into the image, or read them from a bucket",
    "file_mounts_sync_continuously": "no file is copied to machines",
    "rsync_exclude": "no file is copied to machines",
    "rsync_filter": "no file is copied to machines",
    "head_start_ray_commands": "the head's unit starts Ray",
    "worker_start_ray_commands": "the nodes' unit starts Ray",
}
_INSTEAD_OF_PROVIDER: Final[Mapping[str, str]] = {
    "use_internal_ips": "no machine has an external address",
    "gcp_credentials": "the head acts by its own account; no key is in a file",
    "cache_stopped_nodes": "TPU nodes are removed, not stopped",
}
_INSTEAD_OF_DOCKER: Final[Mapping[str, str]] = {
    "container_name": "the container's name is `ray`",
    "pull_before_run": "an image is named by its digest, so it is pulled once",
    "head_image": "head and nodes have one image; set `image`",
    "worker_image": "head and nodes have one image; set `image`",
}
_INSTEAD_ON_NODES: Final[Mapping[str, str]] = {
    "networkConfig": "nodes are in the stack's subnet; `network.subnet` names one that is there",
    "networkInterfaces": "machines are in the stack's subnet; `network.subnet` names one that is there",
    "serviceAccount": "the stack makes an account for the nodes",
    "serviceAccounts": "the stack makes an account for each kind of machine",
    "tags": "the stack tags its machines for its firewall rules",
    "labels": "`labels` of the stack are on all that it makes",
    "metadata": "the stack writes the machines' metadata; a script goes into `setup`",
}
_INSTEAD_ON_HEAD: Final[Mapping[str, str]] = {
    "min_workers": "a cluster has one head, and no pool is of its type",
    "max_workers": "a cluster has one head, and no pool is of its type",
}
_INSTEAD_ON_MEMBERS: Final[Mapping[str, str]] = {
    "CPU": "a member offers the CPUs of a pool of its type, else half of its host's",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedCluster:
    cluster: str
    """The cluster's name in the file; a good name of the stack."""
    settings: Mapping[str, Any]
    """Keys of a stack file, without their prefix."""
    notes: tuple[Note, ...]


def convert_cluster(document: object) -> ConvertedCluster:
    """Convert a cluster file, as YAML reads it. Raises `NotPossible` or `InvalidValue` for anything else."""
    if not isinstance(document, dict) or not {"cluster_name", "provider"} <= document.keys():
        raise NotPossible(
            "the file is no cluster file of Ray",
            facts=["it has `cluster_name`, `provider` and `available_node_types` at its top"],
            hint="name the file that `ray up` takes",
        )
    return _Conversion({str(key): each for key, each in document.items()}).convert()


def render(converted: ConvertedCluster) -> str:
    """Render the stack file."""
    keys = {"pulumi:disable-default-providers": ["*"]}
    keys |= {f"{PREFIX}{key}": value for key, value in converted.settings.items()}
    body = dump_yaml({"config": keys})
    head = [
        f"Made of the Ray cluster file of `{converted.cluster}`; docs/settings.md has every key.",
        "Name it Pulumi.STACK.yaml, then: python -m infra check --stack STACK",
        "Add who may use the cluster: `access`, with `operators` and `researchers`.",
    ]
    if converted.notes:
        head += ["", "What is different, or left out, by its place in that file:"]
        head += [f"- {each.line()}" for each in converted.notes]
    return "".join(f"# {line}".rstrip() + "\n" for line in head) + body


class _Conversion:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._file = document
        self._notes = Notes()
        self._region, self._zone, self._project = self._read_provider()

    def convert(self) -> ConvertedCluster:
        file, notes = self._file, self._notes
        cluster = quote(read_text(file["cluster_name"], "cluster_name", "a name"))
        notes.add("cluster_name", cluster, f"Ray's name of the cluster is STACK-{HEAD}: stop the old one first")
        docker = read_table(file.get("docker"), "docker")
        shared = read_texts(docker.get("run_options"), "docker.run_options")
        head = self._read_container(docker, shared, "head")
        worker = self._read_container(docker, shared, "worker")
        set_up = self._read_commands()
        types = read_table(file.get("available_node_types"), "available_node_types")
        name = self._head_type(types)
        # What both have is the head's, from which pools take what they lack.
        variables = {**head.variables, **set_up.variables}
        machine: dict[str, Any] = {
            **self._read_head(read_table(types[name], f"available_node_types.{name}"), name),
            **self._read_image(docker, cluster),
            "environment": sorted(set_up.secrets),
            "variables": dict(sorted(variables.items())),
            "setup": "".join(f"{line}\n" for line in set_up.lines),
            "container": head.settings(),
            "idle_minutes": self._read_idle_minutes(),
        }
        own = self._differences(worker, head, variables)
        pools = self._read_pools({key: each for key, each in types.items() if key != name}, own)
        self._note_rest()
        registries, overrides = machine.pop("registries"), machine.pop("overrides")
        settings = {
            "project": self._project,
            "region": self._region,
            "zone": self._zone,
            "network": {"cidr": _find_range(1 + sum(each["max"] for each in pools.values()))},
            # Jobs on the cluster keep their records there.
            "records": {"location": self._region},
            "buckets": self._find_buckets([machine, *pools.values()]),
            "registries": registries,
            "secrets": dict(sorted(set_up.secrets.items())),
            "heads": {HEAD: {**{key: each for key, each in machine.items() if each}, "pools": pools}},
            "overrides": overrides,
        }
        if has_known_form(str(settings)):
            raise NotPossible(
                "the file has what looks like the value of a secret, which is not repeated here",
                hint="take it out, and have a new one made: others have read it",
            )
        return ConvertedCluster(
            cluster=cluster,
            settings={key: each for key, each in settings.items() if each},
            notes=notes.all(),
        )

    def _find_buckets(self, machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the buckets that variables name; the old nodes had their rights from a role in the whole project."""
        values = [str(value) for each in machines for value in each.get("variables", {}).values()]
        named = dict.fromkeys(bucket for value in values for bucket in re.findall(r"gs://([a-z0-9._-]+)", value))
        for bucket in named:
            self._notes.add("gs://", bucket, "heads and nodes may read and write it; add who else may to its `buckets`")
        keys = {re.sub(r"[^a-z0-9]+", "-", bucket)[:40].strip("-"): bucket for bucket in named}
        return {key: {"existing": bucket, "writers": ["clusters"]} for key, bucket in keys.items()}

    def _read_provider(self) -> tuple[str, str, str]:
        provider = read_table(self._file["provider"], "provider")
        kind = provider.get("type")
        if kind != "gcp":
            raise NotPossible(
                f"the cluster is one of the provider `{quote(kind)}`, and stacks make clusters on Google's TPUs",
                facts=["expected: provider.type is gcp"],
            )
        zone = read_text(provider.get("availability_zone"), "provider.availability_zone", "a zone")
        if not _ZONE.fullmatch(zone):
            raise InvalidValue("provider.availability_zone", quote(zone), "one zone, such as us-west4-a")
        region = read_text(provider.get("region", zone.rpartition("-")[0]), "provider.region", "a region")
        project = read_text(provider.get("project_id"), "provider.project_id", "a project's id")
        if not PROJECT_ID.fullmatch(project):
            raise InvalidValue("provider.project_id", quote(project), "a project's id, such as lab-1234")
        self._note_keys(
            provider, ("type", "region", "availability_zone", "project_id"), "provider", _INSTEAD_OF_PROVIDER
        )
        return region, zone, project

    def _read_container(self, docker: Mapping[str, Any], shared: list[str], machine: str) -> ContainerSettings:
        where = f"docker.{machine}_run_options"
        options = [*shared, *read_texts(docker.get(f"{machine}_run_options"), where)]
        return read_options(options, where, self._notes, head=machine == "head")

    def _read_commands(self) -> SetUp:
        made, notes, project = SetUp(), self._notes, self._project
        first = read_texts(self._file.get("initialization_commands"), "initialization_commands")
        read_machine_commands(first, "initialization_commands", made, notes, project=project)
        for key in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
            read_container_commands(read_texts(self._file.get(key), key), key, made, notes, project=project)
        return made

    def _head_type(self, types: Mapping[str, Any]) -> str:
        name = self._file.get("head_node_type")
        if not isinstance(name, str) or name not in types:
            raise InvalidValue(
                "head_node_type", quote(name), f"one of available_node_types: {', '.join(map(quote, types)) or 'none'}"
            )
        return name

    def _read_head(self, head: Mapping[str, Any], name: str) -> dict[str, Any]:
        where, notes = f"available_node_types.{quote(name)}", self._notes
        config = read_table(head.get("node_config"), f"{where}.node_config")
        made: dict[str, Any] = {}
        if "machineType" in config:
            kind = read_text(config["machineType"], f"{where}.node_config.machineType", "a machine type")
            made["machine_type"] = kind.rpartition("/")[2]
        disks = config.get("disks") or []
        if not isinstance(disks, list):
            raise InvalidValue(f"{where}.node_config.disks", quote(disks), "a list of disks")
        for index, each in enumerate(disks):
            made |= self._read_disk(each, index, f"{where}.node_config.disks[{index}]")
        resources = read_table(head.get("resources"), f"{where}.resources")
        if resources.get("CPU"):
            notes.add(f"{where}.resources", f"CPU: {resources['CPU']}", "nothing runs on the head but drivers of jobs")
        self._note_keys({key: each for key, each in resources.items() if key != "CPU"}, (), f"{where}.resources", {})
        self._note_keys(config, ("machineType", "disks"), f"{where}.node_config", _INSTEAD_ON_NODES)
        self._note_keys(head, ("node_config", "resources"), where, _INSTEAD_ON_HEAD)
        return made

    def _read_disk(self, disk: object, index: int, where: str) -> dict[str, Any]:
        table = read_table(disk, where)
        params = read_table(table.get("initializeParams"), f"{where}.initializeParams")
        if index > 0:
            self._notes.add(where, params or disk, "a head has one disk; `disk_gb` makes it larger")
            return {}
        made: dict[str, Any] = {}
        if "diskSizeGb" in params:
            size = read_count(params["diskSizeGb"], f"{where}.initializeParams.diskSizeGb", 0)
            made["disk_gb"] = max(size, 50)
            if size < 50:
                self._notes.add(f"{where}.initializeParams", f"diskSizeGb: {size}", "a head's disk has at least 50 GB")
        source = str(params.get("sourceImage") or "")[:LONGEST_TEXT]
        if found := _BOOT_IMAGE.fullmatch(source):
            made["boot_image"] = found[1]
        elif source:
            step = "is no version of an image, and a family would replace the head on its own day; `boot_image` has a version"
            self._notes.add(f"{where}.initializeParams.sourceImage", source, step)
        if "diskType" in params:
            made["disk_type"] = str(params["diskType"]).rpartition("/")[2]
        self._note_keys(params, ("diskSizeGb", "sourceImage", "diskType"), f"{where}.initializeParams", {})
        self._note_keys(table, ("boot", "autoDelete", "type", "initializeParams"), where, {})
        return made

    def _read_image(self, docker: Mapping[str, Any], cluster: str) -> dict[str, Any]:
        """Return the image by its digest, and what the stack has to know of its registry."""
        notes = self._notes
        self._note_keys(
            docker, ("image", "run_options", "head_run_options", "worker_run_options"), "docker", _INSTEAD_OF_DOCKER
        )
        build = "it has to hold Ray and this package: `runtime image build cluster`, `runtime image push cluster`"
        if not docker.get("image"):
            repository = re.sub(r"[^a-z0-9]+", "-", cluster.lower()).strip("-")[:63].strip("-")
            repository = repository if re.match("[a-z]", repository) else "cluster"
            notes.add("docker.image", "none", f"{build}, and write its digest to `image`")
            path = f"{self._region}-docker.pkg.dev/{image_path(self._project)}/{repository}/cluster@{NO_DIGEST}"
            return {"image": path, "registries": {"images": {"repository": repository}}, "overrides": {}}
        image = read_text(docker["image"], "docker.image", "an image")
        found = _IMAGE.fullmatch(image)
        if not found:
            raise InvalidValue("docker.image", quote(image), "HOST/PROJECT/REPOSITORY/NAME:TAG")
        digest = found["digest"] or NO_DIGEST
        notes.add("docker.image", image, f"{build}; `image` has the digest that `push` prints, zeros until then")
        made: dict[str, Any] = {"image": f"{found['name']}@{digest}", "registries": {}, "overrides": {}}
        if google := _GOOGLES.fullmatch(found["name"]):
            region = google["region"]
            project = google["project"].replace("/", ":")
            path = f"projects/{project}/locations/{region}/repositories/{google['repository']}"
            # The repository exists, so the stack does not create one.
            made["registries"] = {"images": {"regions": [region], "existing": {region: path}}}
        elif not found["name"].startswith(("docker.io/rayproject/", "rayproject/")):
            made["overrides"] = {"images": [found["name"].rpartition("/")[0]]}
        return made

    def _read_idle_minutes(self) -> int:
        minutes = read_count(self._file.get("idle_timeout_minutes"), "idle_timeout_minutes", _RAYS_IDLE_MINUTES)
        if not 1 <= minutes <= 1440:
            self._notes.add("idle_timeout_minutes", minutes, "allowed are 1 to 1,440")
        return min(max(minutes, 1), 1440)

    def _differences(
        self, worker: ContainerSettings, head: ContainerSettings, inherited: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return what pools set for themselves; the rest they have from the head."""
        for name in sorted(head.variables.keys() - worker.variables.keys()):
            self._notes.add("docker.head_run_options", f"-e {name}=…", "nodes have the head's variables too")
        container: dict[str, Any] = {"shm_size": worker.shm_size} if worker.shm_size else {}
        if worker.mounts != head.mounts:
            container["mounts"] = worker.mounts
        if worker.options != head.options:
            container["options"] = worker.options
        variables = {name: each for name, each in sorted(worker.variables.items()) if inherited.get(name) != each}
        return {
            **({"variables": variables} if variables else {}),
            **({"container": container} if container else {}),
        }

    def _read_pools(self, types: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        most = read_count(self._file.get("max_workers"), "max_workers", 2)
        pools: dict[str, Any] = {}
        for name, value in types.items():
            where = f"available_node_types.{quote(name)}"
            made = self._read_pool(read_table(value, where), where, most)
            if made is None:
                continue
            key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            if not _POOL.fullmatch(key) or key in pools:
                raise InvalidValue(
                    "name of a node type", quote(name), "40 letters, digits and dashes, by which it differs from others"
                )
            if key != name:
                self._notes.add("available_node_types", name, f"is the pool `{key}`")
            pools[key] = {**made, **own}
        total = sum(each["max"] for each in pools.values())
        if total > most:
            step = f"each pool has its own `max`, and there is none for all; theirs add up to {total:,}"
            self._notes.add("max_workers", most, step)
        return pools

    def _read_pool(self, pool: Mapping[str, Any], where: str, most: int) -> dict[str, Any] | None:
        config = read_table(pool.get("node_config"), f"{where}.node_config")
        accelerator, notes = config.get("acceleratorType"), self._notes
        if not isinstance(accelerator, str):
            step = "pools are of TPUs, by `acceleratorType`; jobs without one run on the CPUs of TPU hosts"
            notes.add(where, config.get("machineType") or config.get("acceleratorConfig") or "no type", step)
            return None
        least = read_count(pool.get("min_workers"), f"{where}.min_workers", 0)
        limit = min(read_count(pool.get("max_workers"), f"{where}.max_workers", most), most)
        capacity = self._read_capacity(config, where)
        hosts = count_hosts(accelerator)
        self._note_keys(
            config, ("acceleratorType", "runtimeVersion", "schedulingConfig"), f"{where}.node_config", _INSTEAD_ON_NODES
        )
        if capacity == "reserved" or (hosts or 1) > 1:
            kind = "reserved nodes" if capacity == "reserved" else f"slices of {hosts} hosts"
            words = ["runtime cluster add", quote(accelerator), f"--count {max(least, 1)} --capacity {capacity}"]
            if config.get("runtimeVersion"):
                words.append(f"--runtime-version {quote(config['runtimeVersion'])}")
            step = f"write a pool of {kind} whose maximum the subnet has room for, or `{' '.join(words)}`"
            notes.add(where, accelerator, step)
            self._note_keys(pool, ("node_config", "resources", "min_workers", "max_workers"), where, {})
            resources = read_table(pool.get("resources"), f"{where}.resources")
            self._note_chips(resources, accelerator, f"{where}.resources")
            self._note_keys(resources, ("TPU",), f"{where}.resources", _INSTEAD_ON_MEMBERS)
            return None
        if limit > _MOST_NODES:
            notes.add(f"{where}.max_workers", limit, f"a pool has at most {_MOST_NODES:,} nodes")
            limit = _MOST_NODES
        if least > limit:
            notes.add(f"{where}.min_workers", least, f"is more than the most, {limit:,}")
        version = read_text(
            config.get("runtimeVersion"), f"{where}.node_config.runtimeVersion", "a TPU software version"
        )
        made = {
            "accelerator": accelerator,
            "runtime_version": version,
            "capacity": capacity,
            "min": min(least, limit),
            "max": limit,
            **self._read_resources(pool, accelerator, where),
        }
        self._note_keys(pool, ("node_config", "resources", "labels", "min_workers", "max_workers"), where, {})
        return made

    def _read_capacity(self, config: Mapping[str, Any], where: str) -> str:
        scheduling = read_table(config.get("schedulingConfig"), f"{where}.node_config.schedulingConfig")
        known = [each for each in ("reserved", "spot", "preemptible") if scheduling.get(each)]
        rest = {key: each for key, each in scheduling.items() if key not in known}
        self._note_keys(rest, ("reserved", "spot", "preemptible"), f"{where}.node_config.schedulingConfig", {})
        return known[0] if known else "on_demand"

    def _read_resources(self, pool: Mapping[str, Any], accelerator: str, where: str) -> dict[str, Any]:
        resources = read_table(pool.get("resources"), f"{where}.resources")
        self._note_chips(resources, accelerator, f"{where}.resources")
        made: dict[str, Any] = {}
        if "CPU" in resources:
            cpus = read_count(resources["CPU"], f"{where}.resources.CPU", 0)
            if cpus:
                made["cpus"] = cpus
            else:
                self._notes.add(
                    f"{where}.resources", "CPU: 0", "a pool offers at least one CPU, half of them by default"
                )
        step = "Ray's resources of a pool follow from its accelerator; `labels` mark its nodes for `label_selector`"
        for name, each in resources.items():
            if name not in ("CPU", "TPU"):
                self._notes.add(f"{where}.resources", f"{name}: {each}", step)
        labels = {key: str(each) for key, each in read_table(pool.get("labels"), f"{where}.labels").items()}
        return {**made, **({"labels": labels} if labels else {})}

    def _note_chips(self, resources: Mapping[str, Any], accelerator: str, where: str) -> None:
        """Note a number of chips other than the type's, which is what nodes offer."""
        chips = count_chips(accelerator)
        if "TPU" in resources and resources["TPU"] != chips:
            own = f"{chips} on each host of a {accelerator}" if chips else f"those of a {quote(accelerator)}"
            self._notes.add(where, f"TPU: {resources['TPU']}", f"nodes offer the chips that they have, {own}")

    def _note_rest(self) -> None:
        done = ("cluster_name", "provider", "docker", "available_node_types", "head_node_type", "max_workers")
        commands = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
        self._note_keys(self._file, (*done, *commands, "idle_timeout_minutes"), "", _INSTEAD)

    def _note_keys(
        self, table: Mapping[str, Any], done: tuple[str, ...], where: str, instead: Mapping[str, str]
    ) -> None:
        """Note each key that was not used, unless it is empty."""
        for key, value in table.items():
            if key not in done and value not in (None, False, "", [], {}):
                path = f"{where}.{quote(key)}".lstrip(".")
                self._notes.add(path, value, instead.get(key, "has no place in a stack; it is left out"))


def _find_range(machines: int) -> str:
    """Return a range of the stack's subnet with room for that many machines; Google keeps four addresses."""
    length = _FIRST_LENGTH
    while 2 ** (32 - length) - 4 < machines and length > 10:
        length -= 1
    return f"10.64.0.0/{length}"
