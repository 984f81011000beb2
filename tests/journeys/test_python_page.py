"""Every example of docs/python.md, run as a reader would: saved under its name, and started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services_support import PATIENCE_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/python.md").read_text()
EXAMPLES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))
PRINTED = {
    "train.py": r"0\.125\n0\.125 \n",
    "many.py": r"\[0, 1, 4, 9, 16\]\n",
    "jobs.py": r"<job j-[0-9a-f]{8} on local> 3\nsucceeded b'hello\\n'\n",
    "search.py": r"12 \d+ \d\S+ {'layers': \d, 'lr': \S+, 'optimizer': '\w+'}\n",
    "tasks.py": r"42 \[0, 2, 4\] 0\n",
}


def test_every_example_has_a_name_and_is_run() -> None:
    assert PAGE.count("```python") == len(EXAMPLES)
    assert EXAMPLES.keys() == PRINTED.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_prints_what_it_should(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(EXAMPLES[name])
    # Equal trees make equal jobs.
    (tmp_path / "salt").write_bytes(os.urandom(12))

    done = subprocess.run(
        [sys.executable, name], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED[name], done.stdout), done.stdout
