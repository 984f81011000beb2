"""The names of a store's objects: which key holds what, and which keys are ours. docs/records.md shows them to people."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from runtime.tasks.model import Task, TaskState, experiment_digest

HEX: Final = "0123456789abcdef"
OUR_ID: Final = re.compile(r"t-[0-9a-f]{24}")
COUNTED: Final = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED)


# The names that listings take for ours, in whole: people, editors and copying tools leave other names beside them.
# A pattern given as text is compiled when a folder or a bucket is listed: the local stack loads this module too.
RECORD: Final = r"records/[0-9a-f]{8}/[0-9a-f]/([\w+@=%-]+)\.g(\d+)\.json"
MARK: Final = r"marks/[0-9a-f]{8}/([\w+@=%-]+)\.g(\d+)\.(failed|cancelled|expired)\.json"
ATTEMPT: Final = r"attempts/[\w+@=%-]+/g\d+/([\w-]+)\.(ended|started|proven|lost)\.json"
EXPERIMENT: Final = r"experiments/([0-9a-f]{8})-[\w.~+@=%-]*\.json"
PART: Final = r"manifests/[0-9a-f]{8}/((\d+)-(\d+)-[0-9a-f]+)\.(jsonl|sent|late|in-[\w.~+@=%-]+)"
COUNTER: Final = r"counters/[0-9a-f]{8}/([\w.~+@=%-]+)/(\d{13})-s(\d+)-f(\d+)-c(\d+)-x(\d+)"
WORKER: Final = re.compile(r"workers/[\w.~+@=%-]+\.json", re.ASCII)
NOTIFICATION: Final = r"notify/(t-[A-Za-z0-9]{1,62}\.g\d+|e-[0-9a-f]{16}\.[0-9a-f]{16})(?:\.try(\d{1,3}))?\.json"
BLOB: Final = re.compile(r"[a-z]+/[0-9a-f]{64}")
ORDER: Final = re.compile(r"((?:merged-)?[0-9a-f]{16})\.json")
MERGED: Final = "merged-"
"""Begins the id of an order that stands in place of several."""


def matched(keys: Iterable[str], shape: str) -> Iterator[re.Match[str]]:
    """The keys of that shape; other names beside them are left out."""
    return filter(None, map(re.compile(shape, re.ASCII).fullmatch, keys))


def newest_of_each(marks: Iterable[re.Match[str]]) -> Iterator[list[re.Match[str]]]:
    """For each task the marks of its newest generation; keys of one task lie side by side."""
    for _, group in itertools.groupby(marks, key=lambda mark: mark[1]):
        ours = list(group)
        newest = max(int(mark[2]) for mark in ours)
        yield [mark for mark in ours if int(mark[2]) == newest]


def shard(task_id: str) -> str:
    """One of 16 folders, so that a listing can go in parallel; chosen by an id's third letter alone, as for prefixes."""
    letter = task_id[2:3].lower() or "0"
    return letter if letter in HEX else HEX[ord(letter) % 16]


def home_key(task_id: str) -> str:
    return f"homes/{shard(task_id)}/{task_id}.json"


def record_key(task_id: str, generation: int, home: str) -> str:
    return f"records/{home}/{shard(task_id)}/{task_id}.g{generation}.json"


def record_shards(experiment: str) -> list[str]:
    digest = experiment_digest(experiment)
    return [f"records/{digest}/{shard}/" for shard in HEX]


def experiment_key(experiment: str) -> str:
    return f"experiments/{experiment_digest(experiment)}-{quoted(experiment)[:200]}.json"


def experiment_of(key: str) -> str | None:
    """The name in the key, unless it was cut."""
    from urllib.parse import unquote

    digest, _, quoted = key.rpartition("/")[2].removesuffix(".json").partition("-")
    name = unquote(quoted)
    return name if experiment_digest(name) == digest else None


def mark_key(home: str, task_id: str, generation: int, state: TaskState) -> str:
    return f"marks/{home}/{task_id}.g{generation}.{state}.json"


def closed_key(mark_key: str) -> str:
    """The object that keeps a closed mark closed, however late a process puts the mark back."""
    return f"closed/{mark_key.removeprefix('marks/').removesuffix('.json')}"


def notification_key(name: str, number: int | None = None) -> str:
    """The message to be sent, or its try of that number."""
    return f"notify/{name}.json" if number is None else f"notify/{name}.try{number}.json"


def told_key(experiment: str, name: str) -> str:
    return f"notified/{experiment_digest(experiment)}/{name}.json"


def order_key(queue: str, name: str) -> str:
    return f"orders/{quoted(queue)}/{name}"


def attempt_key(task: Task, token: str, step: Literal["started", "proven", "lost", "ended"]) -> str:
    return f"attempts/{task.id}/g{task.generation}/{token}.{step}.json"


def worker_key(worker: str) -> str:
    return f"workers/{quoted(worker)}.json"


def counters_folder(experiment: str) -> str:
    return f"counters/{experiment_digest(experiment)}/"


def log_key(task_id: str, token: str) -> str:
    return f"logs/{task_id}/{token}.log"


def reports_key(task_id: str, token: str) -> str:
    return f"metrics/{task_id}/{token}.json"


def quoted(name: str) -> str:
    """Any text as one part of a key."""
    from urllib.parse import quote

    quoted = quote(name, safe="@+=", errors="surrogatepass")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


def unquoted(part: str) -> str:
    """The text that `quoted` made a part of a key."""
    from urllib.parse import unquote

    return unquote(part, errors="surrogatepass")
