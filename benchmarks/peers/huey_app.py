"""huey's application: WAL, synchronous FULL, which is SQLite's default, and results kept."""

from __future__ import annotations

import os
from pathlib import Path

from huey import SqliteHuey

from benchmarks import bodies

huey = SqliteHuey("benchmark", filename=str(Path(os.environ["BENCHMARK_FOLDER"]) / "huey.db"), results=True)


@huey.task()
def noop(index: int) -> bool:
    bodies.noop(index)
    return True  # huey keeps no result that is None.


@huey.task()
def cpu(index: int) -> bool:
    bodies.cpu(index)
    return True


@huey.task()
def absolute(value: int) -> int:
    return abs(value)
