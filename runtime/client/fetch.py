"""Outputs of jobs and tasks, copied home; a file of ours that differs is never lost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.client.local_folder import Became, LocalFolder, check_name
from runtime.errors import NotPossible
from runtime.jobs.ledger import LedgerEntry, check_index, job_folder, list_attempts
from runtime.values import dataclass

if TYPE_CHECKING:
    from runtime.jobs.hosts.base import Files


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    name: str
    """Its name in the record root."""
    place: str
    """Its path in the local folder."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    path: str
    size_bytes: int
    what: Became


class FilesDiffer(NotPossible):
    """Files that were not fetched because other files have their names here."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.names = list(names)
        super().__init__(
            f"{len(names)} files in `{folder}` differ from what was written, and were left as they are",
            facts=list(names)[:10],
            hint="name another folder, or `--overwrite`",
        )


def list_outputs(files: Files, entry: LedgerEntry, indices: Sequence[int] = ()) -> list[RemoteFile]:
    """List the output files of the attempts that count, for all runs or for some."""
    first = entry.first_index
    wanted = [check_index(entry, each) for each in indices] or range(first, first + entry.indices)
    found = []
    for index in wanted:
        for name, relative, size in _outputs_of(files, entry.id, index):
            place = relative if entry.indices == 1 else f"{index}/{relative}"
            found.append(RemoteFile(name=f"{name}/{relative}", place=place, size_bytes=size))
    return found


def _outputs_of(files: Files, job: str, index: int) -> Iterator[tuple[str, str, int]]:
    run = f"{job_folder(job)}/runs/{index}"
    result = json.loads(files.read(f"{run}/result") or b"{}")
    # Results of runs that a retry did not repeat lie with the job that made them.
    run = f"{job_folder(result.get('from', job))}/runs/{index}"
    attempt = result.get("attempt") or max(list_attempts(files, job, index), default=None)
    if attempt is not None:
        folder = f"{run}/output/a{attempt:04d}"
        for relative, size in files.tree(folder):
            yield folder, relative, size


def fetch(files: Files, listed: Sequence[RemoteFile], to: Path, *, overwrite: bool = False) -> Iterator[Fetched]:
    """Copy the files, one by one. A file appears whole or not at all, and below `to`.

    Raises `NameRefused` at the first name that leads elsewhere; files before it stay.
    """
    if not listed:
        return
    with LocalFolder(to) as folder:
        for each in listed:
            became = folder.put(each.place, partial(files.download, each.name), overwrite=overwrite)
            yield Fetched(path=str(to / each.place), size_bytes=each.size_bytes, what=became)


def name_folder(name: str, short: str) -> Path:
    return Path(check_name(f"{name}-{short}"))


def refuse_differing(done: Sequence[Fetched], folder: Path) -> None:
    if differing := [each.path for each in done if each.what is Became.DIFFERS]:
        raise FilesDiffer(folder, differing)


def list_task(text: str, *, stack: str | None) -> tuple[str, Files, list[RemoteFile]]:
    """Return a task's id, its output folder, and the files in it. Raises `NotPossible` if this machine cannot see the folder."""
    from runtime.client.identify import get_task_id, recall_last
    from runtime.client.tasks.status import read_task
    from runtime.jobs.hosts.local import LocalFiles
    from runtime.stack.open import open_stack

    with open_stack(stack) as opened:
        task = get_task_id(text, opened.records, last=recall_last(opened.settings.data_dir, opened.name))
        url = read_task(opened, task).outputs_url
    if url is None:
        raise NotPossible(f"task `{task}` has no outputs", hint=f"runtime status {task}")
    if "://" in url and not url.startswith("file://"):
        tool = f"gcloud storage cp -r {url} ." if url.startswith("gs://") else f"aws s3 cp --recursive {url} ."
        raise NotPossible(
            f"outputs of task `{task}` lie in a bucket", facts=[url], hint=f"copy them with its own tool: {tool}"
        )
    files = LocalFiles(url.removeprefix("file://"))
    listed = [RemoteFile(name=name, place=name, size_bytes=size) for name, size in files.tree("")]
    return check_name(task), files, listed
