"""Reading the process table and the kernel's counters, from captured text and from this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.worker.attempts import processes
from runtime.worker.attempts.processes import ProcessRow

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


# A real line; the command was renamed to hold blanks, parentheses and a line break.
def family(*rows: tuple[int, int, int, str]) -> dict[int, ProcessRow]:
    return {pid: ProcessRow(pid, ppid, session, state, 1000) for pid, ppid, session, state in rows}


def test_descendants_are_found_through_the_dead_and_parents_come_first() -> None:
    table = family(
        (1, 0, 1, "S"), (10, 1, 10, "S"), (11, 10, 10, "Z"), (12, 11, 12, "S"), (13, 10, 10, "R"), (20, 1, 20, "S")
    )
    assert processes.find_descendants(table, 10) == [13, 12]
    assert processes.find_descendants(table, 1) == [10, 20, 13, 12]
    assert processes.find_descendants(table, 99) == []


@linux_only
def test_tree_memory_counts_shared_pages_once_above_the_limit() -> None:
    """Two processes that share 64 MiB hold 64 MiB, not 128."""
    code = (
        "import os, sys, time\n"
        "held = bytearray(64 << 20); held[::4096] = b'x' * len(held[::4096])\n"
        "pid = os.fork()\n"
        "if pid: print('up', flush=True)\n"
        "sum(held[::4096])\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        table = processes.read_table()
        tree = [holder.pid, *processes.find_descendants(table, holder.pid)]
        try:
            resident = sum(table[pid].rss_bytes for pid in tree)
            used = processes.tree_memory_bytes(table, holder.pid, limit_bytes=1 << 20)
        finally:
            processes.send_signal(tree, signal.SIGKILL)
    assert len(tree) == 2
    assert resident > 128 << 20
    assert 64 << 20 < used < 100 << 20


@linux_only
def test_marked_process_is_found_by_its_first_environment() -> None:
    with subprocess.Popen(["sleep", "300"], env={"RUNTIME_ATTEMPT_TOKEN": "abc123"}) as marked:
        try:
            table = processes.read_table()
            assert processes.find_marked(table, ["zzz", "abc123"]) == [marked.pid]
            assert processes.find_marked(table, ["abc12"]) == []
            assert processes.find_marked(table, []) == []
        finally:
            marked.kill()


TREE = """
import os, sys
from runtime.worker.attempts import processes

processes.find_prctl()(processes.PR_SET_CHILD_SUBREAPER, 1)
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, b"x")
    os.execvp("sleep", ["sleep", "600"])
dead = os.fork()
if dead == 0:
    os._exit(0)
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
os.read(read, 1)
print(processes.end_tree(os.getpid(), patience_s=float(sys.argv[1])))
print(len(processes.find_descendants(processes.read_table(), os.getpid())), processes.reap())
"""


def end_tree(*, patience_s: float, change: str = "") -> list[str]:
    """Run `end_tree` over a child in a session of its own and its child; returns what was said."""
    words = [sys.executable, "-c", TREE.replace("read, write", f"{change}\nread, write", 1), str(patience_s)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    return done.stdout.splitlines()


@linux_only
def test_end_tree_kills_all_below_until_nothing_is_left_and_takes_their_statuses() -> None:
    assert end_tree(patience_s=600) == ["2", "0 False"]


def test_memory_at_the_limit_is_not_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table = family((10, 1, 10, "S"), (11, 10, 10, "S"))
    monkeypatch.setattr(processes, "read_file", lambda path, limit: b"Rss: 9 kB\nPss: 1 kB\n")
    assert processes.tree_memory_bytes(table, 10, limit_bytes=2000) == 2000
    assert processes.tree_memory_bytes(table, 10, limit_bytes=1999) == 2048
    # A single process shares nothing with another of the tree.
    assert processes.tree_memory_bytes(table, 11, limit_bytes=1) == 1000


def test_memory_that_the_kernel_does_not_divide_is_the_resident_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "read_file", lambda path, limit: b"")
    assert processes.pss_bytes(10, family((10, 1, 10, "S"))) == 1000
    assert processes.pss_bytes(11, {}) == 0


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        (b"low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n", 2),  # v2 memory.events
        (b"oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),  # v1 memory.oom_control
        (b"nr_free_pages 1\noom_kill 7\n", 7),  # vmstat
        (b"", 0),
    ],
)
def test_oom_counter_is_read_in_each_format(text: bytes, kills: int) -> None:
    assert processes.parse_oom_kills(text) == kills


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        (b"0::/user.slice/run-7.scope\n", "user.slice/run-7.scope/memory.events"),
        (b"0::/system.slice:cri:0123\n", "system.slice:cri:0123/memory.events"),
        (b"9:name=systemd:/\n4:cpu,memory:/job_1/step_0\n0::/\n", "memory/job_1/step_0/memory.oom_control"),
        (b"4:memory:/docker/0123\n", "memory/memory.oom_control"),
        (b"1:name=systemd:/x\n0::/x\n", "unified/x/memory.events"),
    ],
)
def test_oom_counter_is_found_for_v2_v1_containers_and_hybrid(tmp_path: Path, membership: bytes, file: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("oom_kill 0\n")
    assert processes.find_oom_counter(str(tmp_path), membership) == str(tmp_path / file)
