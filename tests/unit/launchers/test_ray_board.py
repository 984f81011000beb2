"""The folder in which the drivers of a head show their claims."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.jobs.spec import Priority
from runtime.launchers.ray import board as boards
from runtime.launchers.ray.board import MOST_BYTES, SILENT_S, Board, decode_claim, encode_claim
from runtime.launchers.ray.priority import Claim, Demand

DEMAND = Demand(job="j-1", owner="ada", priority=Priority.HIGH, kind="CPU", need={"CPU": 2.0}, places=2)
CLAIM = Claim(demand=DEMAND, waiting=3, since=7.5)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Board]]:
    made: list[Board] = []

    def make_board(cluster: str = "10.0.0.2:6379") -> Board:
        made.append(Board(cluster, f"{tmp_path}/turns"))
        return made[-1]

    yield make_board
    for each in made:
        each.close()


def names(board: Board) -> set[str]:
    return {path.name for path in board.folder.iterdir()}


def test_claim_is_read_by_others_as_it_was_written_last(make: Callable[..., Board]) -> None:
    ours, theirs = make(), make()
    assert theirs.read() == []
    ours.write(CLAIM)
    assert (ours.read(), theirs.read()) == ([], [CLAIM])

    last = replace(CLAIM, demand=replace(DEMAND, owner="b"), waiting=0, since=0.0)
    ours.write(last)

    assert theirs.read() == [last]


def test_heads_of_one_machine_do_not_meet(make: Callable[..., Board]) -> None:
    ours, other = make(), make("10.0.0.2:6380")
    ours.write(CLAIM)

    assert other.read() == []
    assert make().read() == [CLAIM]


def test_folder_and_files_are_the_user_s_alone(make: Callable[..., Board]) -> None:
    board = make()
    board.write(CLAIM)

    modes = [path.stat().st_mode & 0o777 for path in (board.folder, *board.folder.iterdir())]
    assert modes == [0o700, 0o600]


_HOLDS = """
import sys
from runtime.launchers.ray.board import Board, decode_claim
board = Board("10.0.0.2:6379", sys.argv[1])
board.write(decode_claim(sys.argv[2].encode()))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("cluster", ["10.0.0.2:6379", "10.0.0.2:6380"])
def test_claim_of_a_driver_that_was_killed_is_none_and_its_file_goes(make: Callable[..., Board], cluster: str) -> None:
    board = make(cluster)
    words = [sys.executable, "-c", _HOLDS, str(board.folder), encode_claim(CLAIM, 1).decode()]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"holds\n"
        assert board.read() == ([CLAIM] if cluster.endswith("6379") else [])
        assert len(names(board)) == 2
        driver.send_signal(signal.SIGKILL)
        driver.wait()

    assert board.read() == []
    assert len(names(board)) == 1


def test_driver_that_ends_takes_its_file_along(make: Callable[..., Board], tmp_path: Path) -> None:
    board, other = make(), Board("10.0.0.2:6379", f"{tmp_path}/turns")
    other.write(CLAIM)
    other.close()

    assert len(names(board)) == 1


def test_runs_of_a_driver_that_stands_still_do_not_wait_before_others(make: Callable[..., Board]) -> None:
    ours, stopped = make(), make()
    stopped.write(CLAIM)
    path = next(path for path in ours.folder.iterdir() if path.stat().st_size)
    os.utime(path, (0, path.stat().st_mtime - 2 * SILENT_S))

    assert ours.read() == [replace(CLAIM, waiting=0)]
    stopped.write(CLAIM)
    assert ours.read() == [CLAIM]


@pytest.mark.parametrize("all_of_it", [False, True])
def test_claim_whose_file_was_removed_is_shown_again(make: Callable[..., Board], all_of_it: bool) -> None:
    """Programs that clean `/tmp` remove what nobody has read for days."""
    ours, theirs = make(), make()
    for each in (ours, theirs):
        each.write(CLAIM)
    for path in list(ours.folder.iterdir()):
        path.unlink()
    if all_of_it:
        ours.folder.rmdir()
    for each in (ours, theirs):
        each.write(CLAIM)

    assert (ours.read(), theirs.read()) == ([CLAIM], [CLAIM])
    assert len(names(ours)) == 2


# what is damaged or foreign


def test_what_no_driver_wrote_is_no_claim_and_reads_nothing_else(make: Callable[..., Board], tmp_path: Path) -> None:
    board, other = make(), make()
    other.write(CLAIM)
    secret = tmp_path / "secret"
    secret.write_bytes(encode_claim(CLAIM, 1))
    prefix = next(iter(names(board))).partition(".")[0]
    (board.folder / f"{prefix}.link").symlink_to(secret)
    (board.folder / f"{prefix}.folder").mkdir()
    os.mkfifo(board.folder / f"{prefix}.pipe")

    assert board.read() == [CLAIM]
    assert secret.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\x00",
        b"[" * 5000,
        encode_claim(CLAIM, 7)[:-2],
        encode_claim(CLAIM, 7).replace(b'"version": 7', b'"version": 8'),
        b"{}" + b" " * MOST_BYTES,
        *(
            json.dumps({**json.loads(encode_claim(CLAIM, 1)), name: value}).encode()
            for name, value in (
                ("owner", 7),
                ("priority", "soon"),
                ("priority", None),
                ("need", {}),
                ("need", {"CPU": "2"}),
                ("need", {"CPU": 0}),
                ("need", {"CPU": float("nan")}),
                ("places", 0),
                ("waiting", -1),
                ("waiting", 1.5),
                ("since", float("inf")),
            )
        ),
    ],
)
def test_damaged_claim_of_a_driver_that_lives_is_none(make: Callable[..., Board], content: bytes) -> None:
    board, other = make(), make()
    other.write(CLAIM)
    path = next(path for path in board.folder.iterdir() if path.stat().st_size)
    path.write_bytes(content)

    assert board.read() == []
    with pytest.raises((ValueError, RecursionError)):
        decode_claim(content)
    other.write(CLAIM)
    assert board.read() == [CLAIM]


def test_claim_that_cannot_be_written_whole_is_none(
    make: Callable[..., Board], monkeypatch: pytest.MonkeyPatch
) -> None:
    board, other = make(), make()
    other.write(CLAIM)
    real: Any = os.pwrite

    def write_some(file: int, content: bytes, at: int) -> int:
        real(file, content[:40], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(boards.os, "pwrite", write_some)
    with pytest.raises(OSError, match="No space left"):
        other.write(replace(CLAIM, waiting=0))
    assert board.read() == []

    monkeypatch.setattr(boards.os, "pwrite", lambda file, content, at: real(file, content[:40], at))
    other.write(CLAIM)
    assert board.read() == []


# other users


def test_folder_of_another_user_s_making_is_not_used(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can make another user's folder")
    squatted = tmp_path / "turns"
    squatted.mkdir()
    os.chown(squatted, 12345, 12345)

    ours, theirs = Board("c", str(squatted)), Board("c", str(squatted))
    ours.write(CLAIM)

    assert ours.folder == theirs.folder != squatted
    assert (theirs.read(), list(squatted.iterdir())) == ([CLAIM], [])
    for each in (ours, theirs):
        each.close()


def test_file_that_another_user_owns_is_no_claim(make: Callable[..., Board]) -> None:
    if os.geteuid():
        pytest.skip("only root can make another user's file")
    board, other = make(), make()
    other.write(CLAIM)
    path = next(path for path in board.folder.iterdir() if path.stat().st_size)
    os.chown(path, 12345, 12345)

    assert board.read() == []
