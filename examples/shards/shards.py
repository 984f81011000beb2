"""Download, transform and tokenize a corpus, a task for each shard of each stage.

The functions are plain: one input, one output, written whole or not at all. `runtime.map_tasks` makes them durable: a shard
that is recorded is never done again, whichever worker or driver dies.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import runtime

WORD = re.compile(r"\w+|[^\w\s]")


def download(url: str, output: str) -> int:
    """Copy one shard; returns its bytes."""
    with urllib.request.urlopen(url) as answer:
        data = answer.read()
    write_whole(output, data)
    return len(data)


def transform(source: str, output: str) -> dict[str, int]:
    """Drop empty and repeated paragraphs; a line of JSON for each that stays."""
    text = Path(source).read_text(encoding="utf-8", errors="replace")
    paragraphs = [" ".join(each.split()) for each in re.split(r"\n\s*\n", text)]
    kept = list(dict.fromkeys(each for each in paragraphs if each))
    write_whole(output, "".join(json.dumps({"text": each}) + "\n" for each in kept).encode())
    return {"kept": len(kept), "dropped": len(paragraphs) - len(kept)}


def tokenize(source: str, output: str) -> dict[str, int]:
    """Count the tokens of a shard; the counts are its output."""
    counts: Counter[str] = Counter()
    for line in Path(source).read_text(encoding="utf-8").splitlines():
        counts.update(WORD.findall(json.loads(line)["text"].lower()))
    write_whole(output, json.dumps(counts, sort_keys=True).encode())
    return {"tokens": counts.total(), "distinct": len(counts)}


def write_whole(output: str, data: bytes) -> None:
    """Write a file that nobody ever sees half written."""
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{runtime.current_attempt().token}")
    part.write_bytes(data)
    part.replace(path)


def run(urls: list[str], folder: Path, **options: Any) -> Counter[str]:
    """Run the three stages, each when the one before is done, and add up what they returned."""

    def into(stage: str, suffix: str) -> Callable[[str], str]:
        return lambda source: str(folder / stage / (Path(source).stem + suffix))

    downloaded = list(runtime.map_tasks(download, urls, output=into("raw", ".txt"), experiment="download", **options))
    raw = [each.output for each in downloaded]
    cleaned = list(runtime.map_tasks(transform, raw, output=into("clean", ".jsonl"), experiment="transform", **options))
    clean = [each.output for each in cleaned]
    tokens = runtime.map_tasks(tokenize, clean, output=into("tokens", ".json"), experiment="tokenize", **options)
    totals: Counter[str] = Counter(bytes=sum(each.value for each in downloaded))
    for number, each in enumerate(tokens, start=1):
        print(f"{number}/{len(tokens)} {Path(each.output).name}: {each.value['tokens']} tokens", file=sys.stderr)
        totals["tokens"] += each.value["tokens"]
    for each in cleaned:
        totals.update(each.value)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the outputs go; all workers see it")
    parser.add_argument("url", nargs="+", help="a shard: https://, or file:// of this machine")
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.url, arguments.folder.absolute()), sort_keys=True))


if __name__ == "__main__":
    from shards import main as main_of_module  # tasks name a module, and `__main__` is none

    main_of_module()
