"""The pages of docs/migrating, followed as a reader would: an empty folder, the page's files, and its command lines in turn.

A block whose first line is `# NAME` with an ending is that file, and a block of `sh` is run. Launches on clusters are dry runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands_support import find_command_lines, find_problem
from tests.services_support import PATIENCE_S

PAGES = Path(__file__).parents[2] / "docs/migrating"
OTHERS = [PAGES.parent / "signing-in.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w.-]+\.\w+)\n")

SEEN: dict[str, list[list[str]]] = {
    "doodad": [
        ["The learning rate is 0.001\nThe learning rate is 0.0001\n", "-easy", "succeeded", "outputs/progress.csv"],
        [
            "on sss (slurm)",
            "--account=co_rail --partition=savio3_2080ti --qos=rail_2080ti3_normal",
            "--cpus-per-task=2 --gres=gpu:1",
            "--mail-user=ada@example.edu --mail-type=FAIL",
        ],
        ["[0.2, 0.4]\n", "on htp (slurm)", "40 runs, 1 native job", "--array=0-1", "--exclusive"],
    ],
    "submitit": [
        ["12\n"],
        ["on hpc (slurm)", "--account=vision --partition=a100", "--cpus-per-task=8", "--gres=gpu:2", "--time="],
        ["[11, 22]\n(3, [3, 4])\nsucceeded b'a command\\n'\n"],
        ["(10, 2)\n"],
    ],
    "phoebe": [
        ["name: worker-pods\n", "seeds: 4\n", "source: claim://l2r-persistent-claim", "count: 0.25\n", "- phortx1\n"],
        ["on phoebe (kubernetes)", "8 runs, 2 native jobs", "kubernetes.io/hostname: phortx1\n"],
    ],
    "studioml": [
        ["first\n", "succeeded  2\n", "models/", "model.txt"],
        ["best: 1\n", "succeeded"],
    ],
}
"""Page → what each of its blocks of commands prints, among other lines, in this order."""


def read_page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def test_every_page_is_followed() -> None:
    assert sorted(SEEN) == sorted(each.stem for each in PAGES.glob("*.md"))


@pytest.mark.parametrize("page", SEEN)
def test_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall(read_page(page))
    shown = SEEN[page]
    folder = tmp_path / "newcomer"
    folder.mkdir()
    # Equal trees make equal jobs.
    (folder / "salt").write_bytes(os.urandom(12))
    for language, text in blocks:
        if language in ("python", "toml", "yaml"):
            named = FILE.match(text)
            assert named, text
            (folder / named[1]).write_text(text)
    lines = [text for language, text in blocks if language == "sh"]
    assert len(lines) == len(shown)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for text, expected in zip(lines, shown, strict=True):
        done = subprocess.run(
            ["sh", "-ec", text],
            cwd=folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, (text, done.stdout, done.stderr)
        found = ".*".join(map(re.escape, expected))
        assert re.search(found, done.stdout, flags=re.DOTALL), (text, done.stdout)


@pytest.mark.parametrize("page", [*sorted(PAGES.glob("*.md")), *OTHERS], ids=lambda each: each.stem)
def test_commands_and_links_exist(page: Path) -> None:
    problems = [find_problem(words) for words in find_command_lines(page.read_text())]
    assert [problem for problem in problems if problem] == []

    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert [link for link in links if not link.startswith("http") and not leads_somewhere(page, link)] == []


def leads_somewhere(page: Path, link: str) -> bool:
    file, _, heading = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    if not heading:
        return target.exists()
    words = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
    return heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in words}
