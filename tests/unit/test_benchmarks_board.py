"""The board of the benchmarks: its report on tasks that ran once, twice and never."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bodies
from benchmarks.board import Board


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    made = Board(tmp_path / "board", 4)
    monkeypatch.setattr(bodies, "_seconds", None)
    monkeypatch.setattr(bodies, "_counts", None)
    made.use_here()
    return made


def test_board_after_each_task_ran_once_has_none_lost_and_none_repeated(board: Board) -> None:
    for index in range(4):
        bodies.noop(index)

    assert board.done(range(4))
    assert (board.lost(range(4)), board.repeated(range(4))) == (0, 0)
    assert 0 < board.span(range(4)) < 60
    assert board.shares(range(4), by_parent=False) == [1.0]


def test_board_shows_a_lost_task_and_a_repeated_one(board: Board) -> None:
    for index in (0, 1, 1, 3):
        bodies.noop(index)

    assert not board.done(range(4))
    assert (board.lost(range(4)), board.repeated(range(4)), board.count_done(range(4))) == (1, 1, 3)
    assert board.start(1) > board.first_start(1)


def test_board_of_a_task_that_began_and_did_not_end_counts_it_lost(board: Board) -> None:
    assert bodies.began(2) == 0
    assert bodies.began(2) == 1

    assert board.lost(range(2, 3)) == 1
    assert board.wait_begun(2, 2, timeout_s=0)
    assert not board.wait(range(2, 3), timeout_s=0)


def test_cpu_body_takes_ten_milliseconds_of_thread_time(board: Board) -> None:
    bodies.cpu(0)

    assert board.end(0) - board.start(0) >= 0.010
