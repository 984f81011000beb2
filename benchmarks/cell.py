"""One measurement in a process of its own: `python -m benchmarks.cell SPEC ANSWER`, both files of JSON.

No peer's libraries, threads or memory remain when the next peer is measured, and processes that a measurement
leaves running end with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.processes import adopt_orphans, die_with_parent, end_descendants


def main(spec_path: str, answer_path: str) -> int:
    spec: dict[str, Any] = json.loads(Path(spec_path).read_text())
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    adopt_orphans()
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    answer: dict[str, Any] = {}
    folder = Path(spec["folder"])
    folder.mkdir()
    try:
        function = getattr(measure, spec["measure"])
        answer["numbers"] = function(folder, spec["services"], **spec["parameters"])
    except Exception as problem:
        answer["problem"] = f"{type(problem).__name__}: {problem}"
        answer["trace"] = traceback.format_exc()
        log = folder / "worker.log"
        if log.exists():
            answer["log"] = log.read_text(errors="replace")[-4000:]
    finally:
        answer["ended"] = end_descendants()
        shutil.rmtree(folder, ignore_errors=True)
        Path(answer_path).write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
