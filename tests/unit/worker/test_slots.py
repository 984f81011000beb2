"""Dividing a machine into slots, checking if tasks fit, and reading the machine's resources."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidValue, NotPossible
from runtime.tasks.model import NO_RESOURCES, Resources
from runtime.worker.slots import HostResources, Slot, describe_slots, fits, plan_slots, read_machine

GIB = 1024**3
FOUR_GPUS = HostResources(cpus=8, memory_bytes=64 * GIB, gpus=("0", "1", "2", "3"))
NO_GPUS = HostResources(cpus=8, memory_bytes=64 * GIB)


@pytest.mark.parametrize(
    ("machine", "slots", "gpus_per_slot", "expected"),
    [
        (NO_GPUS, "auto", 0, [()] * 8),
        (NO_GPUS, 3, 0, [()] * 3),
        (NO_GPUS, 20, 0, [()] * 20),
        (HostResources(0.5, GIB), "auto", 0, [()]),
        (HostResources(2.9, GIB), "auto", 0, [()] * 2),
        (FOUR_GPUS, "auto", 0, [()] * 8),
        (FOUR_GPUS, "auto", 1, [("0",), ("1",), ("2",), ("3",)]),
        (FOUR_GPUS, "auto", 2, [("0", "1"), ("2", "3")]),
        (FOUR_GPUS, "auto", 3, [("0", "1", "2")]),
        (FOUR_GPUS, 1, 4, [("0", "1", "2", "3")]),
        (FOUR_GPUS, "auto", 0.5, [("0",), ("1",), ("2",), ("3",)] * 2),
        (FOUR_GPUS, 2, 0.25, [("0",), ("1",)]),
        (HostResources(4, GIB, ("GPU-a",)), "auto", 0.25, [("GPU-a",)] * 4),
        (HostResources(4, GIB, ("0",)), "auto", 0.3, [("0",)] * 3),
        (HostResources(4, GIB, ("0",)), "auto", 0.1, [("0",)] * 10),
    ],
)
def test_plan_deals_out_gpus(
    machine: HostResources, slots: int | Literal["auto"], gpus_per_slot: float, expected: list[tuple[str, ...]]
) -> None:
    assert [slot.gpus for slot in plan_slots(machine, slots, gpus_per_slot)] == expected


def test_plan_shares_cpus_and_memory_evenly() -> None:
    assert plan_slots(FOUR_GPUS, 2, 2) == (
        Slot(0, cpus=4, memory_bytes=32 * GIB, gpus=("0", "1"), gpu_share=2),
        Slot(1, cpus=4, memory_bytes=32 * GIB, gpus=("2", "3"), gpu_share=2),
    )


@given(
    cpus=st.floats(0.1, 512),
    memory_bytes=st.integers(1, 2**44),
    gpu_count=st.integers(0, 16),
    slots=st.one_of(st.just("auto"), st.integers(1, 64)),
    gpus_per_slot=st.one_of(st.floats(0.01, 0.999), st.integers(0, 16)),
)
def test_shares_never_exceed_the_machine(
    cpus: float, memory_bytes: int, gpu_count: int, slots: Any, gpus_per_slot: float
) -> None:
    machine = HostResources(cpus, memory_bytes, tuple(map(str, range(gpu_count))))
    try:
        planned = plan_slots(machine, slots, gpus_per_slot)
    except NotPossible:
        per_gpu = int(1 / gpus_per_slot + 1e-9) if gpus_per_slot < 1 else 1 / gpus_per_slot
        room = int(gpu_count * per_gpu + 1e-9)
        assert room < (1 if slots == "auto" else slots)
        return

    assert len(planned) >= 1
    assert slots == "auto" or len(planned) == slots
    assert [slot.index for slot in planned] == list(range(len(planned)))
    assert sum(slot.cpus for slot in planned) <= cpus * (1 + 1e-9)
    assert sum(slot.memory_bytes for slot in planned) <= memory_bytes
    load: Counter[str] = Counter()
    for slot in planned:
        assert set(slot.gpus) <= set(machine.gpus)
        assert len(slot.gpus) == (0 if gpus_per_slot == 0 else max(1, gpus_per_slot))
        for gpu in slot.gpus:
            load[gpu] += min(1, slot.gpu_share)  # type: ignore[assignment]
    assert all(total <= 1 + 1e-6 for total in load.values())


def test_more_gpus_than_there_are_is_refused_with_what_would_fit() -> None:
    with pytest.raises(NotPossible) as refused:
        plan_slots(FOUR_GPUS, 5, 1)

    assert refused.value.message == "5 slots with 1 GPU per slot do not fit on 4 GPUs"
    assert refused.value.facts == ("GPUs found: 0, 1, 2, 3", "room for 4 such slots")
    assert refused.value.hint == "`--slots 4` or `--slots auto`, or a smaller `--gpus-per-slot`"


def test_gpus_without_any_here_say_where_we_looked() -> None:
    with pytest.raises(NotPossible) as refused:
        plan_slots(NO_GPUS, "auto", 0.5)

    assert refused.value.message == "no GPU here for 0.5 GPU per slot"
    assert "/dev/nvidia*" in refused.value.facts[1]


def test_slot_larger_than_all_gpus_is_refused() -> None:
    with pytest.raises(NotPossible) as refused:
        plan_slots(FOUR_GPUS, "auto", 8)

    assert refused.value.hint == "ask for at most `--gpus-per-slot 4`"


@pytest.mark.parametrize("gpus_per_slot", [-1, 1.5, float("nan"), float("inf")])
def test_senseless_gpus_per_slot_is_refused(gpus_per_slot: float) -> None:
    with pytest.raises(InvalidValue):
        plan_slots(FOUR_GPUS, "auto", gpus_per_slot)


@pytest.mark.parametrize("slots", [0, -2, 4_097, 10**9])
def test_number_of_slots_that_makes_no_sense_is_refused(slots: int) -> None:
    with pytest.raises(InvalidValue):
        plan_slots(NO_GPUS, slots)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (NO_RESOURCES, None),
        (Resources(), None),
        (Resources(cpus=2, memory_bytes=8 * GIB, gpus=0.25), None),
        (Resources(gpus=0.1), None),
        (Resources(gpus=2), "wants 2 GPUs, a slot has 0.25"),
        (Resources(gpus=1), "wants 1 GPU, a slot has 0.25"),
        (Resources(memory_bytes=16 * GIB), "wants 16GiB of memory, a slot has 8GiB"),
        (Resources(cpus=2.5), "wants 2.5 CPUs, a slot has 2"),
        (
            Resources(cpus=3, memory_bytes=9 * GIB),
            "wants 9GiB of memory, a slot has 8GiB; and 3 CPUs, a slot has 2",
        ),
    ],
)
def test_fits_says_what_is_missing(resources: Resources, expected: str | None) -> None:
    slot = Slot(0, cpus=2, memory_bytes=8 * GIB, gpus=("0",), gpu_share=0.25)

    assert fits(resources, slot) == expected


def test_fits_without_gpus_dealt_out_says_none() -> None:
    assert fits(Resources(gpus=1), Slot(0, 1, GIB)) == "wants 1 GPU, a slot has none"


def test_fits_a_third_three_times() -> None:
    slots = plan_slots(HostResources(1, GIB), 3)

    assert fits(Resources(cpus=1 / 3), slots[2]) is None


def test_environment_of_a_gpu_slot_agrees() -> None:
    assert plan_slots(FOUR_GPUS, 2, 2)[1].environment() == {
        "RUNTIME_SLOT": "1",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "NVIDIA_VISIBLE_DEVICES": "2,3",
    }


def test_environment_where_gpus_are_not_dealt_out_leaves_them_alone() -> None:
    assert plan_slots(FOUR_GPUS, 2)[1].environment() == {"RUNTIME_SLOT": "1"}


def test_describe_slots() -> None:
    assert describe_slots(plan_slots(FOUR_GPUS, "auto", 0.5)) == "8 slots, each 1 CPU, 8GiB and 0.5 GPU"
    assert describe_slots(plan_slots(NO_GPUS, 1)) == "1 slot with 8 CPUs and 64GiB"
    assert describe_slots(plan_slots(NO_GPUS, 3)) == "3 slots, each 2.67 CPUs and 21.3GiB"


# Reading the machine


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1000000 kB\n"
SLURM_V1 = "12:cpu,cpuacct:/slurm/uid_1/job_7\n5:memory:/slurm/uid_1/job_7\n1:name=systemd:/slurm\n"


@pytest.mark.parametrize(
    ("files", "cpus", "memory_gib"),
    [
        pytest.param({}, 8, 16, id="no control groups"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, 8, 16, id="v2 root without limits"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/memory.max": str(2 * GIB),
            },
            1.5,
            2,
            id="v2 container that sees its group as the root",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.max": str(GIB),
            },
            4,
            1,
            id="v2 the tightest of the groups above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": SLURM_V1,
                "sys/fs/cgroup/cpu/slurm/uid_1/job_7/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/slurm/uid_1/job_7/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/slurm/uid_1/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/slurm/uid_1/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/slurm/uid_1/job_7/memory.limit_in_bytes": str(4 * GIB),
            },
            2,
            4,
            id="v1 with one unlimited level",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * GIB),
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
            3,
            id="v1 container whose path is the host's",
        ),
    ],
)
def test_read_machine_takes_the_tightest_limit(
    tmp_path: Path, files: dict[str, str], cpus: float, memory_gib: int
) -> None:
    root = write_tree(tmp_path, {"proc/meminfo": MEMINFO, **files})

    assert read_machine({}, root=root, cpus=8) == HostResources(cpus, memory_gib * GIB)


@pytest.mark.parametrize(
    ("environ", "nodes", "expected"),
    [
        ({}, [], ()),
        ({}, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], ("0", "1")),
        ({}, ["nvidia3"], ("0",)),  # a container with one GPU of four
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, ["nvidia0", "nvidia1", "nvidia2", "nvidia3"], ("2", "3")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0"], ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ["nvidia0"], ()),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["nvidia0", "nvidia1"], ("1",)),
        ({"CUDA_VISIBLE_DEVICES": " 0 , 1,0"}, [], ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f6d,MIG-1"}, ["nvidia0"], ("GPU-8f6d", "MIG-1")),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ["nvidia0", "nvidia1"], ("0", "1")),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, [], ()),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, ["nvidia0"], ()),
        ({"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "0"}, ["nvidia0"], ()),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-8f6d"}, ["nvidia0"], ("GPU-8f6d",)),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3"}, ["nvidia2", "nvidia3"], ("0", "1")),  # the container has only these
        ({"NVIDIA_VISIBLE_DEVICES": "2,3"}, ["nvidia0", "nvidia1", "nvidia2", "nvidia3"], ("2", "3")),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1"}, ["nvidia0", "nvidia1"], ("1",)),
    ],
)
def test_read_machine_finds_the_gpus_that_cuda_would_see(
    tmp_path: Path, environ: dict[str, str], nodes: list[str], expected: tuple[str, ...]
) -> None:
    root = write_tree(tmp_path, {"proc/meminfo": MEMINFO, **{f"dev/{node}": "" for node in nodes}})

    assert read_machine(environ, root=root, cpus=1).gpus == expected


def test_read_machine_on_this_machine_finds_something() -> None:
    machine = read_machine({"NVIDIA_VISIBLE_DEVICES": "none"})

    assert machine.cpus > 0
    assert machine.memory_bytes > 64 * 1024**2
    assert machine.gpus == ()
