"""Jobs that a bundle submitted on a machine without this package: the files of its script become ledger entries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from runtime.client.jobs.job_cache import remember_job
from runtime.client.jobs.targets import find_target, make_context, open_target
from runtime.config import Settings
from runtime.errors import NotPossible
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import NativeJob, job_folder
from runtime.units import format_time

RECORDS = "records"
"""Folder of a bundle that is a record root of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedBundle:
    job: str
    name: str
    target: str
    records: str
    native_ids: tuple[str, ...]
    new: bool


def import_bundle(folder: str, on: str, settings: Settings) -> list[ImportedBundle]:
    """Read a bundle's folder, as the machine of target `on` sees it, and record its jobs. Safe to repeat.

    Raises `NotPossible` for a folder that is no bundle, and for one that was not submitted.
    """
    named = find_target(on, settings)
    root = f"{folder.rstrip('/')}/{RECORDS}"
    with open_target(replace(named, records=root), make_context(settings)) as place:
        found = list(_import(place.files, named.name))
    if not found:
        raise NotPossible(
            f"`{folder}` is no bundle on target `{on}`",
            hint="name the folder that has submit.sh, as that machine sees it; runtime launch --export makes one",
        )
    for each in found:
        remember_job(each.job, named, settings, records=each.records, name=each.name)
    return found


def _import(files: Files, target: str) -> Iterator[ImportedBundle]:
    for job in ledger.list_jobs(files):
        folder = job_folder(job)
        text = files.read(f"{folder}/bundle.json")
        if text is None:
            continue
        bundle: dict[str, Any] = json.loads(text)
        parts = bundle["parts"]
        names = {f"{folder}/submit/{part}.id": part for part in range(len(parts))}
        ids = {names[name]: text.decode().strip() for name, text in sorted(files.read_many(list(names)).items())}
        if len(ids) < len(parts):
            raise NotPossible(
                f"job `{job}` was not submitted: {len(ids)} of {len(parts)} parts have an id",
                hint=f"run submit.sh there, in the folder above `{files.root}`",
            )
        intent = {**bundle, "target": target, "at": format_time(ledger.now()), "from": "a bundle"}
        new = files.create(f"{folder}/intent.json", json.dumps(intent, sort_keys=True).encode())
        for part, native_id in ids.items():
            native = NativeJob(name=parts[part], native_id=native_id, part=part, epoch=1, at=ledger.now())
            ledger.record_native(files, job, native)
        files.create(f"{folder}/launched", format_time(ledger.now()).encode())
        yield ImportedBundle(
            job=job, name=bundle["name"], target=target, records=files.root, native_ids=tuple(ids.values()), new=new
        )
