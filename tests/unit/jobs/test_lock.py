"""The lock of a job: who gets that of a dead holder, and how a holder that stood still finds out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import NotPossible, StoreUnavailable
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.lock import Lock
from runtime.system import system
from tests.services_support import replace_sleep
from tests.shim_support import wait_for


def test_lock_of_a_dead_holder_is_taken_over_and_a_slow_one_finds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.lock.STILL_S", 0.5)
    files = LocalFiles(str(tmp_path))
    slow, other = Lock(files, "j-1", "a@b"), Lock(files, "j-1", "c@d")
    assert slow.take(patience_s=1) is False
    slow._stop.set()

    assert other.take(patience_s=10) is True

    with pytest.raises(NotPossible, match="took this job over"):
        slow.ensure_held()
    other.ensure_held()
    other.release()
    assert files.names("jobs/j-1") == []


HOLDER = """
import sys, time
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.lock import Lock

Lock(LocalFiles(sys.argv[1]), "j-1", "a@b").take(patience_s=60)
print("taken", flush=True)
time.sleep(600)
"""


def test_lock_of_a_killed_process_of_this_machine_is_taken_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.lock.STILL_S", 1e9)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "taken\n"
    files = LocalFiles(str(tmp_path))
    holder.kill()
    holder.wait()
    holder.stdout.close()

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("runtime.jobs.lock._namespace", lambda: "pid:[another]")
        with pytest.raises(NotPossible, match="being launched by another"):
            Lock(files, "j-1", "c@d").take(patience_s=0)

    other = Lock(files, "j-1", "c@d")
    assert other.take(patience_s=0) is True
    other.release()
    assert files.names("jobs/j-1") == []


@pytest.mark.parametrize("content", [b"", bytes(100), b'{"owner": "a', b"[1]", b'{"process": {"pid": "x"}}', b'"x"'])
def test_lock_that_is_spoilt_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("runtime.jobs.lock.STILL_S", 0.0)
    files = LocalFiles(str(tmp_path))
    files.write("jobs/j-1/lock.1", content)

    lock = Lock(files, "j-1", "c@d")
    assert lock.take(patience_s=60) is True
    lock.ensure_held()
    lock.release()
    assert files.names("jobs/j-1") == []


def test_number_of_a_dead_holder_that_another_has_now_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.lock._has_ended", lambda holder: holder.get("owner") == "dead")
    files = LocalFiles(str(tmp_path))
    dead, first, second, slow = (Lock(files, "j-1", owner) for owner in ("dead", "first", "second", "slow"))
    dead.take(patience_s=1)
    dead.stop()
    paused: list[str] = []

    def others_meanwhile(seconds: float) -> None:
        paused.append("slow")
        if len(paused) == 1:
            first.release()
            second.take(patience_s=1)

    # It has seen the dead one's lock, and then that of the first, for which it waits.
    create = files.create

    def too_late(name: str, *args: Any, **kwargs: Any) -> bool:
        if name.endswith("lock.2") and first._number == 0:
            monkeypatch.setattr(files, "create", create)
            first.take(patience_s=1)
        return create(name, *args, **kwargs)

    monkeypatch.setattr(files, "create", too_late)
    monkeypatch.setitem(vars(system), "monotonic", lambda: len(paused))
    replace_sleep(monkeypatch, others_meanwhile)

    with pytest.raises(NotPossible, match="being launched by another"):
        slow.take(patience_s=3)

    second.ensure_held()
    second.release()


def test_lock_of_a_dead_holder_is_taken_over_by_one_of_two_that_watch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.lock.STILL_S", 0.5)
    monkeypatch.setattr("runtime.jobs.lock.BEAT_S", 0.1)
    files = LocalFiles(str(tmp_path))
    dead, quick = Lock(files, "j-1", "a@b"), Lock(files, "j-1", "c@d")
    dead.take(patience_s=1)
    dead.stop()
    reads: list[str] = []

    class LateFiles(LocalFiles):
        def read(self, name: str) -> bytes | None:
            content = super().read(name)
            reads.append(name)
            if len(reads) == 2:
                quick.take(patience_s=10)
            return content

    late = Lock(LateFiles(str(tmp_path)), "j-1", "e@f")

    with pytest.raises(NotPossible, match="being launched by another") as refused:
        late.take(patience_s=60, wait=False)

    quick.ensure_held()
    assert refused.value.facts == ("holder: c@d",)
    quick.release()


def test_holder_that_stood_still_does_not_take_the_lock_of_a_later_one_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.lock.STILL_S", 0.5)
    files = LocalFiles(str(tmp_path))
    slow, other, later = Lock(files, "j-1", "a@b"), Lock(files, "j-1", "c@d"), Lock(files, "j-1", "e@f")
    slow.take(patience_s=1)
    slow.stop()
    other.take(patience_s=10)
    other.release()
    later.take(patience_s=1)

    with pytest.raises(NotPossible, match="took this job over"):
        slow.ensure_held()
    slow.release()

    later.ensure_held()
    later.release()
    assert files.names("jobs/j-1") == []


def test_lock_is_kept_through_a_moment_in_which_its_place_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.jobs.lock.BEAT_S", 0.02)
    refused: list[str] = []

    class Files(LocalFiles):
        def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
            if do == "if_held" and not refused:
                refused.append(do)
                raise StoreUnavailable("not now")
            return super().ask(do, *args, patience_s=patience_s)

    files = Files(str(tmp_path))
    holder = Lock(files, "j-1", "a@b")
    holder.take(patience_s=1)
    before = files.read("jobs/j-1/lock.1")

    try:
        wait_for(lambda: refused and files.read("jobs/j-1/lock.1") != before, "a beat after the refusal", 20)
    finally:
        holder.release()


def test_lock_that_was_lost_after_a_look_does_not_come_back_with_the_next_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[str] = []

    class Files(LocalFiles):
        def ask(self, do: str, *args: Any, patience_s: float = 60) -> Any:
            beats.extend([do] if do == "if_held" else [])
            return super().ask(do, *args, patience_s=patience_s)

    monkeypatch.setattr("runtime.jobs.lock.BEAT_S", 0.02)
    files = Files(str(tmp_path))
    slow = Lock(files, "j-1", "a@b")
    slow.take(patience_s=1)
    monkeypatch.setattr(slow, "is_held", lambda: True)  # It stands still behind its look.
    files.remove("jobs/j-1")
    before = len(beats)

    try:
        wait_for(lambda: len(beats) >= before + 3, "some beats", 20)
        assert files.names("jobs/j-1") == []
    finally:
        slow.stop()
