"""A small data-curation pipeline over a tree of source files: statistics, MinHash signatures, near-duplicates.

Map and reduce, as plain typed functions. `tokens` reads one shard of the files and writes a row for each, `duplicates`
reads the rows of all shards and finds the files that are nearly the same. `shards` makes the list of tasks. The code
uses only the standard library, and the runtime for two things: where to write and when to stop.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Final

import runtime

SHINGLE_TOKENS: Final = 5
BINS: Final = 64
BAND_ROWS: Final = 4
"""64 bins in 16 bands of 4 find 99 % of pairs with a Jaccard similarity of 0.7, and one in eight of pairs with 0.3."""
SHORTEST: Final = 50
"""Files with fewer tokens are counted but not compared, because licence headers and empty packages all look alike."""
LARGEST_BYTES: Final = 4 * 1024 * 1024
"""Larger files are left out of the shards: they are data, not source."""

LANGUAGES: Final[Mapping[str, str]] = {
    ".py": "Python", ".pyi": "Python", ".c": "C", ".h": "C", ".cc": "C++", ".cpp": "C++", ".hpp": "C++", ".cu": "CUDA",
    ".go": "Go", ".java": "Java", ".js": "JavaScript", ".ts": "TypeScript", ".rs": "Rust", ".sh": "Shell",
    ".toml": "config", ".yaml": "config", ".yml": "config", ".cfg": "config", ".md": "text", ".rst": "text", ".txt": "text",
}  # fmt: skip
_HASH_COMMENTS: Final = frozenset({"Python", "Shell", "config"})
_NO_COMMENTS: Final = frozenset({"text"})

_TOKEN: Final = re.compile(r"[^\W\d]\w*|\d[\w.]*|[^\w\s]")
_TRIPLE_QUOTED: Final = re.compile(r"^[ \t]*[rRuU]?(\"\"\"|''')(?:[^\\]|\\.)*?\1", re.MULTILINE | re.DOTALL)
_NAME: Final = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class FileRow:
    """Facts that the map step finds about one file."""

    path: str
    """Path below the tree's root."""
    language: str
    bytes: int
    lines: int
    blank: int
    comment: int
    """Lines that hold nothing but a comment."""
    docstring: int
    """Lines of Python docstrings."""
    tokens: int
    names: int
    """Distinct words: identifiers and keywords, including those in comments and strings."""
    mean_name: float
    """Their mean length, weighted by use."""
    common: list[str]
    """The five most used names."""
    sha256: str
    signature: list[int]
    """MinHash of its shingles; empty for a file that is too short to compare."""

    @property
    def code(self) -> int:
        return self.lines - self.blank - self.comment - self.docstring


# The steps, as workflows


def shards(into: Path, path: Path | None = None, count: int = 32) -> dict[str, Any]:
    """Divide a tree into shards of about equal size.

    Args:
        into: Folder for the lists of files and for `tasks.jsonl`, which `runtime submit --from` takes.
        path: Root of the tree; the standard library of this Python if left out.
        count: How many shards.
    """
    root = (path or Path(sysconfig.get_path("stdlib"))).resolve()
    files = sorted(find_files(root), key=lambda each: (-each[1], each[0]))
    if not files:
        raise ValueError(f"no source files below {root}; looked for {' '.join(LANGUAGES)}")
    into.mkdir(parents=True, exist_ok=True)
    count = min(count, len(files))
    lists = []
    for number in range(count):
        # Dealing out by size gives every shard its part of the large files.
        names = sorted(name for name, _ in files[number::count])
        each = (into / f"shard-{number:03}.txt").resolve()
        each.write_text("\n".join([str(root), *names]) + "\n", encoding="utf-8")
        lists.append(each)
    tasks = [
        {"project": "curation", "workflow": "tokens", "args": [f"--shard={each}"], "key": each.stem} for each in lists
    ]
    (into / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    return {"root": str(root), "files": len(files), "bytes": sum(size for _, size in files), "shards": count}


def tokens(shard: Path) -> dict[str, Any]:
    """Compute statistics and a signature for each file of one shard, as `rows.jsonl` in the attempt's output folder.

    Args:
        shard: A list of files: the root on its first line, then a path below it on each.
    """
    attempt = runtime.current_attempt()
    root, *names = shard.read_text(encoding="utf-8").splitlines()
    rows = []
    for done, name in enumerate(names):
        if attempt.should_stop():
            raise InterruptedError(f"asked to stop after {done} of {len(names)} files")
        data = Path(root, name).read_bytes()
        rows.append(measure(name, data))
        attempt.progress(done + 1, len(names))
    output = Path(attempt.output_dir, "rows.jsonl")
    write_rows(output, [{"root": root, **asdict(row)} for row in rows])
    return {
        "output": str(output),
        "files": len(rows),
        "bytes": sum(row.bytes for row in rows),
        "tokens": sum(row.tokens for row in rows),
    }


def duplicates(inputs: Path, threshold: float = 0.7) -> dict[str, Any]:
    """Find near-duplicate files over all shards, and totals by language; write the groups to `clusters.jsonl`.

    Args:
        inputs: A list of `rows.jsonl` files, one per line, or a folder to search for them.
        threshold: The least Jaccard similarity of the shingles of two files that count as nearly the same.
    """
    attempt = runtime.current_attempt()
    roots: dict[str, Path] = {}
    rows: dict[str, FileRow] = {}
    for fields in read_rows(inputs):
        # A file may appear twice, if an attempt was repeated; its row is the same.
        roots[fields["path"]] = Path(fields.pop("root"))
        rows[fields["path"]] = FileRow(**fields)
    candidates = find_candidates(rows.values())
    pairs = verify(candidates, rows, roots, threshold)
    clusters = cluster(pairs, rows)
    output = Path(attempt.output_dir, "clusters.jsonl")
    write_rows(output, clusters)
    return {
        "output": str(output),
        "languages": sum_languages(rows.values()),
        "candidates": len(candidates),
        "pairs": len(pairs),
        "clusters": len(clusters),
        "spare_tokens": sum(each["spare_tokens"] for each in clusters),
        "largest": clusters[:10],
    }


workflows = {"shards": shards, "tokens": tokens, "duplicates": duplicates}
"""Functions that `runtime run curation NAME` and a task's `"workflow": NAME` find."""


# Files


def find_files(root: Path) -> Iterator[tuple[str, int]]:
    """Yield path below `root` and size of each source file, except in installed packages, caches and hidden folders."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            each
            for each in folders
            if not each.startswith(".") and each not in ("__pycache__", "site-packages", "dist-packages")
        )
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in LANGUAGES and path.is_file() and path.stat().st_size <= LARGEST_BYTES:
                yield str(path.relative_to(root)), path.stat().st_size


def measure(path: str, data: bytes) -> FileRow:
    text = data.decode("utf-8", "replace")
    language = LANGUAGES.get(Path(path).suffix, "other")
    found = _TOKEN.findall(text)
    used = {token: times for token, times in Counter(found).items() if _NAME.match(token)}
    uses = sum(used.values())
    lines = text.splitlines()
    stripped = [line.strip() for line in lines]
    return FileRow(
        path=path,
        language=language,
        bytes=len(data),
        lines=len(lines),
        blank=stripped.count(""),
        comment=count_comments(stripped, language),
        docstring=count_docstring_lines(text) if language == "Python" else 0,
        tokens=len(found),
        names=len(used),
        mean_name=round(sum(len(name) * times for name, times in used.items()) / uses, 2) if uses else 0.0,
        common=[name for name, _ in sorted(used.items(), key=lambda item: (-item[1], item[0]))[:5]],
        sha256=hashlib.sha256(data).hexdigest(),
        signature=sign(shingles(found)) if len(found) >= SHORTEST else [],
    )


def count_comments(stripped: Iterable[str], language: str) -> int:
    if language in _NO_COMMENTS:
        return 0
    marks = ("#",) if language in _HASH_COMMENTS else ("//", "/*", "* ", "*/")
    return sum(line.startswith(marks) for line in stripped)


def count_docstring_lines(text: str) -> int:
    """Count lines of triple-quoted strings that begin a line, without blank lines, which are counted already.

    This is much faster than parsing, and right for source that follows the usual layout.
    """
    return sum(sum(bool(line.strip()) for line in found[0].splitlines()) for found in _TRIPLE_QUOTED.finditer(text))


# MinHash: https://www.cs.princeton.edu/courses/archive/spring13/cos598C/broder97resemblance.pdf


class _TokenHashes(dict[str, int]):
    """Maps a token to the same number in every process, unlike `hash`."""

    def __missing__(self, token: str) -> int:
        value = self[token] = zlib.crc32(token.encode("utf-8", "surrogatepass"))
        return value


_HASHES: Final = _TokenHashes()


def shingles(found: list[str]) -> set[int]:
    """A 32-bit number for each run of five tokens; one number for all tokens if there are fewer."""
    hashes = [_HASHES[token] for token in found] or [0]
    hashes += [0] * (SHINGLE_TOKENS - len(hashes))
    # The hash of numbers, unlike that of text, is the same in every process.
    return {
        hash(run) >> 16 & 0xFFFFFFFF
        for run in zip(hashes, hashes[1:], hashes[2:], hashes[3:], hashes[4:], strict=False)
    }


def sign(items: set[int]) -> list[int]:
    """The least item of each of 64 bins; two sets agree in a share of the bins that is about their Jaccard similarity.

    Each item is hashed once instead of 64 times: its last six bits choose the bin. A bin that stays empty borrows from the
    next bin that is not empty, with the distance mixed in. https://arxiv.org/abs/1406.4784
    """
    least: list[int | None] = [None] * BINS
    for item in items:
        bin_ = item & (BINS - 1)
        known = least[bin_]
        if known is None or item < known:
            least[bin_] = item
    signature = []
    for bin_ in range(BINS):
        distance = next(step for step in range(BINS) if least[(bin_ + step) % BINS] is not None)
        borrowed = least[(bin_ + distance) % BINS]
        assert borrowed is not None
        signature.append((borrowed + distance * 0x9E3779B1) & 0xFFFFFFFF)
    return signature


def estimate(left: list[int], right: list[int]) -> float:
    """Estimate the Jaccard similarity from two signatures, to about 0.06."""
    return sum(a == b for a, b in zip(left, right, strict=True)) / BINS


def jaccard(left: set[int], right: set[int]) -> float:
    common = len(left & right)
    return common / (len(left) + len(right) - common)


# Near-duplicates


def find_candidates(rows: Iterable[FileRow]) -> list[tuple[str, str]]:
    """Return the pairs of paths that share a band of their signatures."""
    buckets: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for row in rows:
        for start in range(0, len(row.signature), BAND_ROWS):
            buckets[(start, *row.signature[start : start + BAND_ROWS])].append(row.path)
    pairs: set[tuple[str, str]] = set()
    for paths in buckets.values():
        paths.sort()
        # If very many are alike, a chain connects them as well as all pairs do.
        pairs.update(combinations(paths, 2) if len(paths) <= 100 else pairwise(paths))
    return sorted(pairs)


def verify(
    candidates: Iterable[tuple[str, str]], rows: Mapping[str, FileRow], roots: Mapping[str, Path], threshold: float
) -> list[tuple[str, str, float]]:
    """Return the candidates whose shingles really are that similar, with their similarity."""
    sets: dict[str, set[int]] = {}

    def shingles_of(path: str) -> set[int]:
        if path not in sets:
            sets[path] = shingles(_TOKEN.findall(Path(roots[path], path).read_bytes().decode("utf-8", "replace")))
        return sets[path]

    pairs = []
    for left, right in candidates:
        if rows[left].sha256 == rows[right].sha256:
            similarity = 1.0
        elif estimate(rows[left].signature, rows[right].signature) < threshold - 0.25:
            continue  # four standard errors away: reading both files would not change the result
        else:
            similarity = jaccard(shingles_of(left), shingles_of(right))
        if similarity >= threshold:
            pairs.append((left, right, round(similarity, 3)))
    return pairs


def cluster(pairs: Iterable[tuple[str, str, float]], rows: Mapping[str, FileRow]) -> list[dict[str, Any]]:
    """Group files connected by pairs; the groups with the most removable tokens come first."""
    leader: dict[str, str] = {}

    def find(path: str) -> str:
        while leader.setdefault(path, path) != path:
            leader[path] = path = leader[leader[path]]
        return path

    least: dict[str, float] = {}
    for left, right, similarity in pairs:
        first, second = sorted((find(left), find(right)))
        leader[second] = first
        least[first] = min(similarity, least.get(first, 1.0), least.get(second, 1.0))
    groups: dict[str, list[str]] = defaultdict(list)
    for path in sorted(leader):
        groups[find(path)].append(path)
    clusters = [
        {
            "files": paths,
            "similarity": least[first],
            "spare_tokens": sum(rows[path].tokens for path in paths) - max(rows[path].tokens for path in paths),
        }
        for first, paths in groups.items()
    ]
    return sorted(clusters, key=lambda each: (-each["spare_tokens"], each["files"]))


def sum_languages(rows: Iterable[FileRow]) -> list[dict[str, Any]]:
    """Return totals by language, the language with the most tokens first."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        totals[row.language].update(
            files=1,
            bytes=row.bytes,
            tokens=row.tokens,
            code=row.code,
            comment=row.comment,
            docstring=row.docstring,
            blank=row.blank,
        )
    ordered = sorted(totals.items(), key=lambda item: (-item[1]["tokens"], item[0]))
    return [{"language": language, **counts} for language, counts in ordered]


# Rows on disk


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write all rows or no file, so that a reader never sees half of them."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)


def read_rows(inputs: Path) -> Iterator[dict[str, Any]]:
    if inputs.is_dir():
        paths = sorted(inputs.rglob("rows.jsonl"))
    else:
        paths = [Path(line) for line in inputs.read_text(encoding="utf-8").splitlines()]
    if not paths:
        raise FileNotFoundError(f"no rows.jsonl in {inputs}")
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
