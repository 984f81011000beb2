"""The settings of a target of kind `slurm`, read and checked once.

[tool.runtime.targets.hpc]
kind = "slurm"
host = "login.hpc.example.org"            # absent: this machine submits
records = "/scratch/lab/runtime"          # a folder that the nodes see
partition = "main"
[tool.runtime.targets.hpc.gpu]            # over the rest, for jobs that ask for GPUs; `cpu` for the others
partition = "a100"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, cast

from runtime.errors import InvalidValue, NotPossible, UnknownName
from runtime.jobs.plan import Target
from runtime.jobs.spec import JobSpec, Priority
from runtime.launchers.settings import SettingsReader, read_target_settings


class GpuOption(StrEnum):
    """Which option of sbatch asks for GPUs."""

    GRES = "gres"
    PER_NODE = "gpus-per-node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How jobs of one sort are submitted. The tables `gpu`, `cpu` and `capacity.NAME` may override each field."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cpus: int | None = None
    """CPUs of each node if the spec names none."""
    memory: str | None = None
    """Memory, as `--mem` takes it, if the spec names none."""
    flags: tuple[str, ...] = ()
    """Further words for sbatch."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run before everything else on the node, such as `module load cuda`."""
    python: str | None = None
    """Interpreter of the shim; `python3` after the setup lines if None."""
    image: str | None = None
    """Container image if the spec names none."""
    pre: tuple[str, ...] = ()
    """Lines of shell that run inside the container, before the command."""
    container_flags: tuple[str, ...] = ()
    """Further words for `apptainer exec`."""
    max_time: timedelta | None = None
    """Longest `--time` of the partition; a job's grace is taken off its limit rather than go beyond."""
    gpu_option: GpuOption = GpuOption.GRES


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings(Profile):
    gpu: Mapping[str, Any] = field(default_factory=dict)
    cpu: Mapping[str, Any] = field(default_factory=dict)
    capacity: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    priorities: Mapping[str, Any] = field(default_factory=dict)
    """Our priority → QOS."""
    host: str | None = None
    options: tuple[str, ...] = ()
    """Words for ssh."""
    login_python: str = "python3"
    """Interpreter on a login node that is reached by ssh."""
    bin: str | None = None
    """Folder of sbatch and the other commands, if it is not on PATH."""
    slurm_conf: str | None = None
    max_array_size: int = 1001
    """MaxArraySize of `scontrol show config`: the first task number that Slurm refuses."""
    max_submit: int | None = None
    """How many tasks a user may have submitted at a time; above that a task serves several indices in turn."""
    container: str = "apptainer"
    """Its command: `apptainer` or `singularity`."""
    scratch: str | None = None
    """Folder on the nodes for trees."""
    paths: Mapping[str, Any] = field(default_factory=dict)
    """Path in a spec → path on this target, by the longest beginning."""
    pack_steps: bool = False
    """Whether each run of a packed node is a step of its own, which Slurm keeps to its CPUs and memory."""
    ht_helper: str | None = None
    """The site's own packer and its options, such as `ht_helper.sh -n 1 -s 1 -v`; an array is then one job with a task
    file."""

    def profile_for(self, spec: JobSpec) -> Profile:
        """The profile of a job: the target's own, overridden by that of its accelerator and that of its capacity."""
        found: Profile = self
        for part in (self.gpu if spec.resources.gpus else self.cpu, self._capacity(spec)):
            found = replace(found, **part)
        return found

    def _capacity(self, spec: JobSpec) -> Mapping[str, Any]:
        wanted = spec.placement.capacity
        if wanted is None or wanted.startswith("reservation:"):
            return {}
        if wanted in self.capacity:
            return self.capacity[wanted]
        if wanted == "auto":
            return {}
        raise NotPossible(
            f"`placement.capacity` is {wanted}, and the target does not say what that is on Slurm",
            facts=[f"named there: {', '.join(sorted(self.capacity)) or 'none'}"],
            hint=f'add capacity.{wanted} = {{ partition = "…" }} to the target',
        )

    def map_path(self, path: str) -> str:
        for begin in sorted(self.paths, key=len, reverse=True):
            if path == begin or path.startswith(begin.rstrip("/") + "/"):
                return str(self.paths[begin]).rstrip("/") + path[len(begin.rstrip("/")) :]
        return path


_EXPECTED: Final = {"gpu_option": "gres or gpus-per-node"}


def read_settings(target: Target) -> SlurmSettings:
    """Read the settings of a target. Raises `UnknownName` or `InvalidValue` for one that cannot be used."""
    where = f"targets.{target.name}"
    found = read_target_settings(SlurmSettings, target, _EXPECTED)
    for name in found.priorities:
        if name not in set(Priority):
            raise UnknownName("priority", name, [each.value for each in Priority], where=f"in {where}.priorities")
    # A name that begins with a hyphen would be an option of ssh.
    if found.host is not None and (found.host.startswith("-") or any(char.isspace() for char in found.host)):
        raise InvalidValue(f"{where}.host", found.host, "a host as `ssh` knows it, such as me@login1")
    for option in found.options:
        if option.replace(" ", "").lower().removeprefix("-o").startswith("stricthostkeychecking=no"):
            raise NotPossible(
                f"target `{target.name}` turns the check of host keys off",
                hint=f"connect once by hand and say yes to its key: ssh {found.host}",
            )
    capacity = {name: _read_changes(each, f"{where}.capacity.{name}") for name, each in found.capacity.items()}
    gpu, cpu = (_read_changes(getattr(found, name), f"{where}.{name}") for name in ("gpu", "cpu"))
    return replace(found, gpu=gpu, cpu=cpu, capacity=capacity)


def _read_changes(given: object, where: str) -> dict[str, Any]:
    """The fields of a profile that a table sets."""
    profile = SettingsReader("", _EXPECTED).read_record(Profile, given, where)
    return {name: getattr(profile, name) for name in cast("Mapping[str, Any]", given)}
