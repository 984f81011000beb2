"""The example workflow: its measurements, its MinHash, and the near-duplicates it finds."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import runtime

FOLDER = Path(__file__).parents[3] / "examples" / "curation"


class Attempt:
    """A stand-in for the context of a running attempt."""

    def __init__(self, folder: Path) -> None:
        self.output_dir = folder
        self.steps: list[tuple[float, float | None]] = []
        self.stop_after: int | None = None

    def progress(self, done: float, total: float | None = None) -> None:
        self.steps.append((done, total))

    def should_stop(self) -> bool:
        return self.stop_after is not None and len(self.steps) >= self.stop_after


@pytest.fixture(scope="module")
def curation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curation", FOLDER / "curation.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["curation"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Attempt:
    folder = tmp_path / "outputs"
    folder.mkdir()
    attempt = Attempt(folder)
    monkeypatch.setattr(runtime, "current_attempt", lambda: attempt, raising=False)
    return attempt


def source(seed: int, statements: int = 200) -> str:
    """Generate a module of random statements, the same for the same seed."""
    chance = random.Random(seed)
    names = [f"name_{chance.randrange(400)}" for _ in range(statements * 3)]
    lines = [f"{a} = {b}({c})" for a, b, c in zip(names[::3], names[1::3], names[2::3], strict=True)]
    return "\n".join(lines) + "\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A module, a near copy, an exact copy, an unrelated module, and files to skip."""
    root = tmp_path / "tree"
    text = source(1)
    files = {
        "a/original.py": text,
        "b/near_copy.py": text.replace("\n", "\n# edited\n", 3),
        "b/exact_copy.py": text,
        "unrelated.py": source(2),
        "short.py": "import os\n",
        "short_too.py": "import os\n",
        "main.c": "/* entry */\nint main(void)\n{\n  return 0;  // fine\n}\n",
        "notes.txt": "# not a comment\n",
        "logo.svg": "<svg/>",
        ".git/config.py": text,
        "__pycache__/cached.py": text,
        "site-packages/installed.py": text,
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def map_all(curation: ModuleType, attempt: Attempt, lists: Path, outputs: Path) -> None:
    for shard in sorted(lists.glob("shard-*.txt")):
        attempt.output_dir = outputs / shard.stem
        attempt.output_dir.mkdir(parents=True)
        curation.tokens(shard)
    attempt.output_dir = outputs


def test_shards_hold_each_source_file_once(curation: ModuleType, tree: Path, tmp_path: Path) -> None:
    summary = curation.shards(tmp_path / "lists", path=tree, count=3)

    lists = [path.read_text().splitlines() for path in sorted((tmp_path / "lists").glob("shard-*.txt"))]
    names = sorted(name for each in lists for name in each[1:])
    assert summary == {
        "root": str(tree),
        "files": 8,
        "bytes": sum((tree / name).stat().st_size for name in names),
        "shards": 3,
    }
    assert all(each[0] == str(tree) for each in lists)
    assert names == [
        "a/original.py", "b/exact_copy.py", "b/near_copy.py", "main.c", "notes.txt", "short.py", "short_too.py",
        "unrelated.py",
    ]  # fmt: skip


def test_shards_write_tasks_that_submit_takes(curation: ModuleType, tree: Path, tmp_path: Path) -> None:
    from runtime.tasks.model import WorkflowEntry
    from runtime.tasks.wire import decode_task

    curation.shards(tmp_path / "lists", path=tree, count=2)

    tasks = [decode_task(line) for line in (tmp_path / "lists/tasks.jsonl").read_text().splitlines()]
    assert [task.entry for task in tasks] == [
        WorkflowEntry("curation", "tokens", (f"--shard={tmp_path / 'lists' / f'shard-00{number}.txt'}",))
        for number in range(2)
    ]
    assert {task.key for task in tasks} == {"shard-000", "shard-001"}


def test_shards_are_no_more_than_files(curation: ModuleType, tree: Path, tmp_path: Path) -> None:
    assert curation.shards(tmp_path / "lists", path=tree, count=50)["shards"] == 8


def test_shards_of_a_tree_without_source_say_so(curation: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ValueError, match="no source files below"):
        curation.shards(tmp_path / "lists", path=tmp_path / "empty")


def test_rows_of_a_tiny_tree(
    curation: ModuleType, attempt: Attempt, tree: Path, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    curation.shards(tmp_path / "lists", path=tree, count=1)

    summary = curation.tokens(tmp_path / "lists/shard-000.txt")

    rows = (attempt.output_dir / "rows.jsonl").read_text()
    assert summary["files"] == len(rows.splitlines()) == 8
    assert attempt.steps == [(number, 8) for number in range(1, 9)]
    golden("curation/rows.jsonl", rows.replace(str(tree), "TREE"))


def test_counts_of_lines_and_names(curation: ModuleType) -> None:
    text = '''"""About this.

Three lines of text.
"""
# A comment.
import os


def area(width, height):
    """One line."""
    return width * height  # no line of its own


QUERY = """
not a docstring
"""
'''

    row = curation.measure("pkg/area.py", text.encode())

    assert (row.language, row.lines, row.blank, row.comment, row.docstring) == ("Python", 16, 5, 1, 4)
    assert row.code == 6
    assert row.common[:4] == ["height", "line", "of", "width"]


def test_counts_by_language(curation: ModuleType) -> None:
    c = curation.measure("main.c", b"/* entry */\n// more\nint *p;\n*p = 1;\n")
    config = curation.measure("setup.cfg", b"# why\n[a]\n")
    text = curation.measure("README.md", b"# Title\n")

    assert [(row.language, row.comment) for row in (c, config, text)] == [("C", 2), ("config", 1), ("text", 0)]


def test_bytes_that_are_no_utf_8_are_measured(curation: ModuleType) -> None:
    row = curation.measure("latin.py", "café = 1\n".encode("latin-1"))

    assert (row.bytes, row.lines) == (9, 1)


def test_empty_file_has_no_signature(curation: ModuleType) -> None:
    row = curation.measure("__init__.py", b"")

    assert (row.lines, row.tokens, row.mean_name, row.signature) == (0, 0, 0.0, [])


def test_signature_is_the_same_in_every_process(curation: ModuleType) -> None:
    here = curation.measure("a.py", source(1).encode()).signature
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import curation\n"
        "print(json.dumps(curation.measure('a.py', sys.stdin.buffer.read()).signature))"
    )

    printed = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER)],
        input=source(1).encode(),
        capture_output=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ).stdout

    assert json.loads(printed) == here
    assert len(set(here)) > 60


@pytest.mark.parametrize("similarity", [0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_estimate_is_near_the_similarity(curation: ModuleType, similarity: float) -> None:
    chance = random.Random(similarity)
    estimates = []
    for _ in range(20):
        items = [chance.randrange(2**32) for _ in range(2000)]
        common = round(2000 * 2 * similarity / (1 + similarity) / 2)
        own = 1000 - common
        left, right = set(items[:1000]), set(items[own : 1000 + own])
        assert curation.jaccard(left, right) == pytest.approx(similarity, abs=0.002)
        estimates.append(curation.estimate(curation.sign(left), curation.sign(right)))

    # The mean of 20 pairs with 64 bins each has a standard error of at most 0.014.
    assert sum(estimates) / 20 == pytest.approx(similarity, abs=0.06)


def test_small_sets_fill_every_bin(curation: ModuleType) -> None:
    signature = curation.sign({5, 70})

    assert len(signature) == curation.BINS
    assert curation.sign({5, 70}) == signature
    assert curation.estimate(signature, curation.sign({6, 71, 1000})) < 0.2


def test_few_tokens_make_one_shingle(curation: ModuleType) -> None:
    assert len(curation.shingles(["a", "b"])) == 1
    assert curation.shingles(["a", "b"]) != curation.shingles(["b", "a"])
    assert len(curation.shingles(list("abcdef"))) == 2


def test_near_and_exact_copies_are_found_and_nothing_else(
    curation: ModuleType, attempt: Attempt, tree: Path, tmp_path: Path
) -> None:
    curation.shards(tmp_path / "lists", path=tree, count=4)
    map_all(curation, attempt, tmp_path / "lists", tmp_path / "rows")

    result = curation.duplicates(tmp_path / "rows")

    original = curation.measure("a/original.py", (tree / "a/original.py").read_bytes())
    (found,) = map(json.loads, (tmp_path / "rows/clusters.jsonl").read_text().splitlines())
    assert found["files"] == ["a/original.py", "b/exact_copy.py", "b/near_copy.py"]
    assert 0.9 < found["similarity"] < 1
    assert found["spare_tokens"] == result["spare_tokens"] == 2 * original.tokens
    assert (result["clusters"], result["pairs"], result["largest"]) == (1, 3, [found])
    assert [(each["language"], each["files"]) for each in result["languages"]] == [("Python", 6), ("C", 1), ("text", 1)]


def test_threshold_keeps_near_copies_out(curation: ModuleType, attempt: Attempt, tree: Path, tmp_path: Path) -> None:
    curation.shards(tmp_path / "lists", path=tree, count=1)
    map_all(curation, attempt, tmp_path / "lists", tmp_path / "rows")

    result = curation.duplicates(tmp_path / "rows", threshold=1.0)

    assert result["largest"][0]["files"] == ["a/original.py", "b/exact_copy.py"]


def test_rows_that_come_twice_count_once(curation: ModuleType, attempt: Attempt, tree: Path, tmp_path: Path) -> None:
    curation.shards(tmp_path / "lists", path=tree, count=2)
    map_all(curation, attempt, tmp_path / "lists", tmp_path / "rows/first")
    once = curation.duplicates(tmp_path / "rows")
    map_all(curation, attempt, tmp_path / "lists", tmp_path / "rows/second")
    listed = tmp_path / "inputs.txt"
    listed.write_text("\n".join(map(str, sorted((tmp_path / "rows").rglob("rows.jsonl")))))

    twice = curation.duplicates(listed)

    assert len(listed.read_text().splitlines()) == 4
    assert {**twice, "output": ""} == {**once, "output": ""}


def test_no_rows_are_an_error(curation: ModuleType, attempt: Attempt, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no rows\.jsonl"):
        curation.duplicates(tmp_path)


def test_asked_to_stop_leaves_no_rows(curation: ModuleType, attempt: Attempt, tree: Path, tmp_path: Path) -> None:
    curation.shards(tmp_path / "lists", path=tree, count=1)
    attempt.stop_after = 3

    with pytest.raises(InterruptedError, match="3 of 8 files"):
        curation.tokens(tmp_path / "lists/shard-000.txt")

    assert list(attempt.output_dir.iterdir()) == []


def test_chain_of_pairs_is_one_cluster(curation: ModuleType) -> None:
    rows = {
        name: curation.measure(f"{name}.py", source(1, 100 + 10 * index).encode()) for index, name in enumerate("abcd")
    }

    clusters = curation.cluster([("c", "d", 0.8), ("a", "b", 0.9), ("b", "c", 0.75)], rows)

    assert [each["files"] for each in clusters] == [["a", "b", "c", "d"]]
    assert clusters[0]["similarity"] == 0.75


def test_workflows_take_their_arguments_from_the_command_line(
    curation: ModuleType, attempt: Attempt, tree: Path, tmp_path: Path
) -> None:
    from runtime.tasks.workflows import bind_arguments

    def call(name: str, *args: str) -> dict[str, object]:
        found = bind_arguments(curation.workflows[name], args, name=f"curation {name}")()
        assert isinstance(found, dict)
        return found

    assert call("shards", f"--into={tmp_path / 'the lists'}", f"--path={tree}", "--count=1")["shards"] == 1
    assert call("tokens", f"--shard={tmp_path / 'the lists/shard-000.txt'}")["files"] == 8
    assert call("duplicates", f"--inputs={attempt.output_dir}", "--threshold=0.9")["clusters"] == 1
    assert set(curation.workflows) == {"shards", "tokens", "duplicates"}
