"""Trials that are jobs of a target.

A folder of the user's data has a create-only note for each trial, with its variant and the id of its job, and is written
before the job is launched. The study's own note has the call and its code, so that later trials run what the first ones ran.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Final

from runtime.client.jobs.calls import fields_of_call
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.launch import carry_out
from runtime.client.jobs.prepare import LaunchOptions, LaunchRequest, PreparedLaunch, prepare
from runtime.client.jobs.targets import OpenTarget, find_target, make_context, open_target
from runtime.client.values import End
from runtime.config import load_settings
from runtime.errors import RequestRefused, StoreBroken
from runtime.experiments.jobs import JobCalls
from runtime.experiments.space import spell
from runtime.experiments.tune import check_same, warn_of_code
from runtime.faults import reach
from runtime.file_trust import make_folders
from runtime.jobs import ledger
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.ledger import job_folder
from runtime.snapshots.snapshot import Snapshot

FOLDER: Final = "studies"
_STUDY: Final = "study.json"
_TRIAL: Final = {"item", "job"}


class StudyDamaged(StoreBroken):
    """A note of a study is gone or cannot be read, so what was asked for one of its trials is not known."""

    def __init__(self, name: str, file: str, *, gone: bool) -> None:
        super().__init__(
            f"study `{name}` cannot go on: its note `{file}` " + ("is gone" if gone else "is damaged"),
            facts=["the results of its jobs are where they were"],
            hint=f'bring the note back, or give the study another name: name="{name}-2"',
        )


class JobPlace:
    """A job of one run for each trial, whose index is the trial's number."""

    at_once = True

    def __init__(
        self, function: Callable[..., Any], name: str, target: str, told: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> None:
        if "array" in fields:
            raise RequestRefused("`array` has no place in a study: each of its trials is one run", hint="leave it out")
        self._name, self._told = name, told
        self._settings = load_settings()
        self._target = find_target(target, self._settings)
        given = dict(fields)
        options = given.pop("options", None) or LaunchOptions(experiment=name)
        made, options = fields_of_call(function, fields={"name": name, **given}, options=options, items=({},), run=True)
        self._fields, self._options = made, options
        self._calls: dict[int, JobCalls] = {}
        self._ended: dict[int, str] = {}
        """Trial → job, of those that had ended before this program began."""
        self._place: OpenTarget | None = None
        folder = str(self._settings.data_dir / FOLDER / self._target.name)
        make_folders(folder)
        self._notes = LocalFiles(folder)

    def read(self) -> Sequence[Mapping[str, Any]]:
        first = self._prepare(0, {})  # refuses what can be refused before anything is written
        code = first.snapshot
        begun = self._list_trials()
        if self._notes.read(f"{self._name}/{_STUDY}") is None and not begun:
            if code is not None:
                self._notes.create(f"{self._name}/{code.id.removeprefix('sha256:')}.tar", code.archive)
            note = {"told": self._told, "call": self._fields["call"], "code": code.id if code else None}
            self._notes.create(f"{self._name}/{_STUDY}", json.dumps(note).encode())
        study = self._decode(_STUDY, self._notes.read(f"{self._name}/{_STUDY}"), {"told", "call", "code"})
        check_same(self._name, study["told"], self._told)
        self._adopt(study, code)
        return self._read_trials()

    def _adopt(self, study: Mapping[str, Any], code: Snapshot | None) -> None:
        """Run the study's first function and arguments, but under the terms of now."""
        call, self._fields["call"] = self._fields["call"], study["call"]
        same = study["code"] == (code.id if code else None)
        if not same or study["call"].get("pickled") != call.get("pickled"):
            warn_of_code(self._name, study["code"])
        if same:
            self._options = replace(self._options, snapshot=code)
            return
        archive = self._notes.read(f"{self._name}/{str(study['code']).removeprefix('sha256:')}.tar")
        if archive is None:
            raise RequestRefused(
                f"the code that study `{self._name}` was begun with is gone: {study['code']}",
                hint=f'give the study another name: name="{self._name}-2"',
            )
        self._options = replace(self._options, snapshot=Snapshot(archive=archive))

    def _list_trials(self) -> list[str]:
        return [name for name in self._notes.names(self._name) if name.removesuffix(".json").isdecimal()]

    def _read_trials(self) -> list[Mapping[str, Any]]:
        names = self._list_trials()
        read = self._notes.read_many(f"{self._name}/{name}" for name in names)
        notes: dict[int, dict[str, Any]] = {}
        for number in range(len(names)):
            notes[number] = self._decode(f"{number}.json", read.get(self._note(number)), _TRIAL)
        if notes:
            self._place = open_target(self._target, make_context(self._settings))
            outcomes = ledger.read_outcomes(self._place.files)
            self._ended = {number: note["job"] for number, note in notes.items() if note["job"] in outcomes}
        return [notes[number]["item"] for number in range(len(notes))]

    def _decode(self, file: str, data: bytes | None, keys: Set[str]) -> dict[str, Any]:
        """A note of this study. Raises `StudyDamaged` for one that is gone, cut off or something else."""
        try:
            found = json.loads(data or b"")
        except ValueError:
            found = None
        if not isinstance(found, dict) or not keys <= found.keys():
            raise StudyDamaged(self._name, f"{self._notes.root}/{self._name}/{file}", gone=data is None)
        return found

    def start(self, number: int, variant: Mapping[str, Any]) -> Mapping[str, Any]:
        name, prepared = self._note(number), self._prepare(number, variant)
        note: dict[str, Any] = {"item": dict(variant), "job": prepared.plan.job.id}
        if not self._notes.create(name, json.dumps(note).encode()):
            stands = self._decode(f"{number}.json", self._notes.read(name), _TRIAL)
            if spell(stands["item"]) != spell(note["item"]):
                prepared = self._prepare(number, stands["item"])
            note = stands
            if note["job"] != prepared.plan.job.id:
                # The terms or the target's settings have changed since.
                if self._was_launched(note["job"]):
                    self._watch(number, note["job"])
                    return dict(note["item"])
                note = {**note, "job": prepared.plan.job.id}
                self._notes.write(name, json.dumps(note).encode())
        reach("tune.noted")
        self._calls[number] = JobCalls(carry_out(prepared, self._options))
        return dict(note["item"])

    def look(self, open: Sequence[int]) -> dict[int, End]:
        found: dict[int, End] = {}
        for number in open:
            if number in self._ended:
                self._watch(number, self._ended.pop(number))
            calls = self._calls.get(number)
            for end in calls.look([0]).values() if calls else ():
                found[number] = end
        for number in found:
            calls = self._calls.pop(number)
            if calls.job.host is not (self._place.host if self._place else None):
                calls.job.close()
        return found

    def close(self) -> None:
        for each in self._calls.values():
            each.job.close()
        if self._place is not None:
            self._place.close()

    def _note(self, number: int) -> str:
        return f"{self._name}/{number}.json"

    def _prepare(self, number: int, variant: Mapping[str, Any]) -> PreparedLaunch:
        fields = {**self._fields, "array": {"items": [dict(variant)], "offset": number}}
        return prepare(LaunchRequest(fields, source="`runtime.tune`"), self._target, self._settings, self._options)

    def _was_launched(self, job: str) -> bool:
        place = self._open()
        return place.files.read(f"{job_folder(job)}/intent.json") is not None

    def _watch(self, number: int, job: str) -> None:
        place = self._open()
        self._calls[number] = JobCalls(JobHandle(job, place.target, place.launcher, place.host))

    def _open(self) -> OpenTarget:
        if self._place is None:
            self._place = open_target(self._target, make_context(self._settings))
        return self._place
