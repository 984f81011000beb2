"""Jobs on Slurm: `sbatch` runs once for each part, even if a launch is killed; everything else takes as few commands as
possible.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final

from runtime.end_reasons import Explanation
from runtime.errors import InvalidValue, NotPossible
from runtime.faults import reach
from runtime.jobs.array import read_indices
from runtime.jobs.hosts.base import Host, read_tail
from runtime.jobs.hosts.local import LocalFiles, LocalHost
from runtime.jobs.hosts.ssh import SshHost
from runtime.jobs.ledger import newest_natives, read_entry
from runtime.jobs.plan import (
    FieldSupport,
    JobIdentity,
    LaunchPlan,
    NativePart,
    NativeStart,
    NativeState,
    OwnedResource,
    PlanContext,
    Target,
    check_record_folder,
)
from runtime.jobs.run_config import activation_lines, environment_order, make_order
from runtime.jobs.secret_schemes import COMMON_SCHEMES, SecretScheme
from runtime.jobs.spec import BuildOn, CodeMode, JobSpec, JobState, When
from runtime.jobs.spec_fields import set_fields
from runtime.launchers.job_status import judge_job
from runtime.launchers.slurm import render, states
from runtime.launchers.slurm.client import (
    NOT_ASKED,
    SlurmClient,
    SlurmUnavailable,
    is_no_answer,
    read_code,
    read_id,
    wait_for,
)
from runtime.launchers.slurm.explain import explain_failed, explain_pending, explain_refusal
from runtime.launchers.slurm.field_support import INTERRUPTS, KEEPS
from runtime.launchers.slurm.settings import Profile, SlurmSettings, read_settings
from runtime.launchers.slurm.states import Layout, SlurmRow

ANSWER_S: Final = 180.0
"""How long a launch waits for sbatch, which tries again by itself while the controller is busy."""
SETTLE_S: Final = 10.0
"""How long a launch looks for the job of a killed sbatch, which may still create it, before it starts another."""
GONE_S: Final = 150.0
_FOLDERS: Final = ("SCRATCH", "WORK", "PSCRATCH", "SCRATCHDIR")


class SlurmLauncher:
    kind: ClassVar[str] = "slurm"
    keeps: ClassVar[Mapping[str, FieldSupport]] = KEEPS
    secret_schemes: ClassVar[Mapping[str, SecretScheme]] = COMMON_SCHEMES
    resumes: ClassVar[bool] = False
    keeps_ended: ClassVar[bool] = False
    interrupts: ClassVar[Mapping[str, FieldSupport]] = INTERRUPTS

    def check_settings(self, target: Target) -> None:
        settings = read_settings(target)
        check_record_folder(target)
        if settings.host and not target.records:
            raise InvalidValue(
                f"targets.{target.name}.records",
                None,
                "a folder that the login node and the nodes see, such as /scratch/me/runtime",
            )

    def open_host(self, target: Target, context: PlanContext) -> Host:
        settings = read_settings(target)
        if settings.host is None:
            return LocalHost(find_records(target, context))
        return SshHost(
            settings.host,
            target.records or "",
            python=settings.login_python,
            options=settings.options,
            control_folder=context.settings.cache_dir / "ssh",
        )

    # deciding

    def plan(self, spec: JobSpec, target: Target, job: JobIdentity, context: PlanContext) -> LaunchPlan:
        settings = read_settings(target)
        profile = settings.profile_for(spec)
        indices = read_indices(spec.array, context.base)
        if settings.host:
            root = str(target.records).rstrip("/")
        else:
            root = LocalFiles(find_records(target, context)).root
        if settings.ht_helper is not None and spec.array is not None:
            slices = [render.Slice(None, None, len(indices))]
            served = range(spec.array.offset, spec.array.offset + len(indices))
            artefacts = {
                "job.sh": render.render_ht_script(job.id, settings, profile),
                "tasks.txt": render.render_task_file(profile.python or "python3", settings, served),
            }
        else:
            slices = render.split_array(spec, len(indices), settings)
            artefacts = {"job.sh": render.render_script(spec, job.id, settings, profile)}
        times = render.plan_times(spec, profile, slices)
        order = self._order(spec, settings, profile, job, indices, context, times)
        parts = []
        for number, piece in enumerate(slices):
            name = states.native_name(job.id, root, number, piece.layout)
            words = render.sbatch_words(spec, settings, profile, name, job.owner, piece, times)
            parts.append(_part(name, number, piece.layout, "job.sh", words, render.script_words(number, piece)))
        return LaunchPlan(
            job=job,
            spec=spec,
            target=target,
            order=order,
            artefacts={**artefacts, "sbatch.txt": render.show_words(parts)},
            parts=tuple(parts),
            fidelity={name: KEEPS[name] for name in set_fields(spec) if name in KEEPS},
            indices=tuple(indices),
            root=root,
            notes=times.notes,
        )

    def _order(
        self,
        spec: JobSpec,
        settings: SlurmSettings,
        profile: Profile,
        job: JobIdentity,
        indices: Sequence[Mapping[str, Any]],
        context: PlanContext,
        times: render.SlurmTimes,
    ) -> dict[str, Any]:
        backend: dict[str, Any] = {}
        packed = spec.array is not None and spec.array.pack is not None
        if packed and spec.array and settings.ht_helper is None:
            backend["pack"] = {"slots": spec.array.pack, "per": spec.array.pack_per.value}
            if settings.pack_steps:
                backend["pack"]["step"] = render.step_words(spec, profile)
        contained = bool(spec.image or profile.image)
        name = spec.environment.name
        on_node = replace(spec, environment=replace(spec.environment, name=name and settings.map_path(name)))
        own = [*activation_lines(spec if contained else on_node), *spec.environment.setup]
        if setup := [*profile.setup, *([] if contained else own)]:
            backend["setup"] = setup
        if spec.nodes > 1:
            backend["launch_ranks"] = render.srun_words(spec)
        if made := environment_order(spec, BuildOn.SUBMIT):
            if contained:
                raise NotPossible(
                    "`environment.manager` makes an environment on the nodes, which a container does not have",
                    hint="build it into the image; environment.name and environment.setup work inside of it",
                )
            backend["environment"] = made
        # Requeuing a job whose runs share a node would end its other runs too.
        requeue = not packed and settings.ht_helper is None
        if requeue:
            backend["requeue"] = ["scontrol", "requeue", "{native}"]
        live = settings.map_path(str((context.base / spec.code.path).resolve()))
        order = make_order(
            replace(spec, environment=replace(spec.environment, setup=())),
            job,
            indices,
            context,
            retries="requeue" if requeue else "shim",
            environ=context.environ,
            live_tree=live if spec.code.mode is CodeMode.NONE else None,
            **backend,
        )
        if times.limit is not None:
            order["time_limit_s"] = times.limit.total_seconds()
        if times.minutes is not None:
            order["native_limit_s"] = times.minutes * 60
        if "output_dir" in order:
            order["output_dir"] = settings.map_path(order["output_dir"])
        if spec.checkpoint and spec.checkpoint.dir:
            order["checkpoint"]["dir"] = settings.map_path(spec.checkpoint.dir)
        names = render.variable_names(spec, order["runs"])
        if wrap := render.container_words(spec, settings, profile, names, own):
            order["wrap"] = wrap
        return order

    # starting

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        """Submit one part, once. After a crash a second call waits for the sbatch that the first one started."""
        client = self._client(plan.target, host)
        folder = f"{host.files.root}/{plan.folder}"
        epoch = int(plan.order.get("epoch", 1))
        if epoch > 1:
            words = [
                f"--job-name={part.name}.e{epoch}" if "--job-name=" in word else word for word in part.native["words"]
            ]
            part = replace(part, name=f"{part.name}.e{epoch}", native={**part.native, "words": words})
        prefix = f"{epoch}.{part.native['number']}."
        found = host.files.names(f"{plan.folder}/submit", prefix)
        tries = sorted(int(name.removeprefix(prefix)) for name in found)
        if tries:
            native = self._answer_of_earlier(plan, part, client, host, f"submit/{prefix}{tries[-1]}")
            if native is not None:
                return native
        if plan.order.get("environment", {}).get("build_on") == BuildOn.SUBMIT:
            self._build_environment(plan, client, host, folder)
        host.files.make_folder(f"{plan.folder}/slurm")
        number = tries[-1] + 1 if tries else 1
        words = [word.replace(render.FOLDER, folder) for word in part.native["words"]]
        words += self._dependencies(plan, host)
        words.append(f"{folder}/artefacts/{part.artefact}")
        words += [word.replace(render.FOLDER, folder) for word in part.native["script"]]
        attempt = f"submit/{prefix}{number}"
        until = time.monotonic() + ANSWER_S
        pid = client.start_sbatch(words, part.name, f"{folder}/{attempt}", folder)
        reach("launch.submitting")
        client.await_sbatch(pid, ANSWER_S)
        return self._answer(plan, part, client, host, attempt, until - time.monotonic())

    def _answer_of_earlier(
        self, plan: LaunchPlan, part: NativePart, client: SlurmClient, host: Host, attempt: str
    ) -> str | None:
        """The id that an earlier try got; None if that try made no job."""
        path = f"{host.files.root}/{plan.folder}/{attempt}"

        def ended() -> str | None:
            if read_code(host.files.read(f"{plan.folder}/{attempt}/code")) is not None:
                return "answered"
            return "gone" if client.sbatch_lives(path) is False else None

        how = wait_for(ended, ANSWER_S)
        if how is None:
            raise SlurmUnavailable(
                f"an earlier `sbatch` for job `{plan.job.id}` has not answered yet",
                facts=[f"it was started by another launch, and may still make the job; see {path} on `{host.name}`"],
                hint="run the same command again in a while",
            )
        code = read_code(host.files.read(f"{plan.folder}/{attempt}/code"))
        if code == "0":
            return self._answer(plan, part, client, host, attempt, ANSWER_S)
        if code == NOT_ASKED:
            return None
        said = (host.files.read(f"{plan.folder}/{attempt}/err") or b"").decode("utf-8", "replace")
        return self._find_native(plan, part, host) if code is None or is_no_answer(said) else None

    def _find_native(self, plan: LaunchPlan, part: NativePart, host: Host) -> str | None:
        return wait_for(lambda: self.find(plan.target, [part.name], host).get(part.name), SETTLE_S)

    def _answer(
        self, plan: LaunchPlan, part: NativePart, client: SlurmClient, host: Host, attempt: str, seconds: float
    ) -> str:
        names = [f"{plan.folder}/{attempt}/{name}" for name in ("code", "out", "err")]
        found: dict[str, bytes] = {}

        def code() -> str | None:
            found.update(host.files.read_many(names))
            return read_code(found.get(names[0]))

        ended = wait_for(code, seconds)
        if ended is None:
            raise SlurmUnavailable(
                f"`sbatch` for job `{plan.job.id}` did not answer within {ANSWER_S:g} s, and goes on trying",
                hint="run the same command again: it waits for the answer and starts no second job",
            )
        out, err = (found.get(name, b"").decode("utf-8", "replace") for name in names[1:])
        if ended == "0" and (native := read_id(out)):
            return native
        if ended == NOT_ASKED:
            raise SlurmUnavailable(
                f"`squeue` does not answer: {_last(err)}",
                facts=["whether the job is there already is not known, so nothing was submitted"],
                hint="run the same command again",
            )
        if is_no_answer(err):
            if native := self._find_native(plan, part, host):
                return native
            raise SlurmUnavailable(
                f"slurm did not answer `sbatch`: {_last(err)}",
                hint="run the same command again: it looks for the job before it starts another",
            )
        raise explain_refusal(plan, client, _last(err or out) or f"exit code {ended}")

    def _dependencies(self, plan: LaunchPlan, host: Host) -> list[str]:
        """Options that make a part wait for the jobs in `after` that have not had the end it waits for.

        The record root is read first, since a job that Slurm forgot would count as done.
        """
        wanted = []
        for each in plan.spec.dependencies:
            entry = read_entry(host.files, each.job)
            if entry is None:
                if int(plan.order.get("epoch", 1)) > 1:
                    continue  # it existed at the launch, and was collected since
                raise NotPossible(
                    f"`after` names `{each.job}`, which was not launched on target `{plan.target.name}`",
                    hint="dependencies hold between jobs of one target, by their whole ids: `runtime status`",
                )
            status, _ = judge_job(entry, plan.target, self, host)
            if each.is_met(status.state):
                continue
            otherwise = sum(status.counts.get(state, 0) for state in (JobState.FAILED, JobState.CANCELLED))
            if status.state.terminal or (otherwise and each.when is When.OK):
                how = f"ended as {status.state}" if status.state.terminal else "has runs that failed"
                raise NotPossible(
                    f"`after` names `{each}`, and that job {how}",
                    facts=[f"reason: {status.reason}"] if status.reason else [],
                    hint=f"runtime explain {each.job[:10]}; any:{each.job[:10]} waits for its end, however that is",
                )
            natives = [native.native_id for native in newest_natives(status.entry)]
            when = When.ANY if otherwise and each.when is When.NOTOK else each.when
            wanted.append((when, natives))
        return render.dependency_words(wanted)

    def _build_environment(self, plan: LaunchPlan, client: SlurmClient, host: Host, folder: str) -> None:
        profile = read_settings(plan.target).profile_for(plan.spec)
        lines = "\n".join(["set -e", *profile.setup, 'exec "$@"'])
        words = [profile.python or "python3", f"{folder}/shim.py", folder, "--prepare"]
        done = client.run("bash", "-lc", lines, "prepare", *words, timeout_s=3600)
        if done.code != 0:
            raise NotPossible(
                f"the environment of job `{plan.job.id}` cannot be made on `{host.name}`",
                facts=(done.err or done.out).strip().splitlines()[-5:],
                hint="environment.build_on: node makes it where the job runs",
            )

    # asking

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        # The folder of a try is made before its sbatch runs: a job without a try has never existed.
        jobs = {name: name.partition(".")[0] for name in names}
        tried = {job for job in set(jobs.values()) if host.files.names(f"jobs/{job}/submit")}
        names = [name for name, job in jobs.items() if job in tried]
        if not names:
            return {}
        client = self._client(target, host)
        found = _first_ids(client.queue_named(names))
        missing = [name for name in names if name not in found]
        if missing:
            found.update(_first_ids(client.accounting_named(missing) or []))
        return found

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        client = self._client(target, host)
        queue = client.queue(native_ids)
        live = {row.job for row in queue if not row.has_ended}
        ended = {row.job for row in queue if row.has_ended}
        asked = [native for native in native_ids if native not in live or native in ended]
        problem, accounting = "", None
        try:
            accounting = client.accounting(asked)
        except SlurmUnavailable as failure:
            problem = failure.message
        rows = states.merge_rows(queue, accounting or [])
        known = {row.job for row in rows}
        found = list(states.to_states(rows))
        if problem:
            found += [
                NativeState(native_id=native, index=None, state=JobState.UNKNOWN, raw="unknown", message=problem)
                for native in native_ids
                if native not in known
            ]
        return found

    def list_starts(self, target: Target, names: Mapping[str, str], index: int, host: Host) -> list[NativeStart]:
        wanted = []
        for native, name in names.items():
            layout = states.read_layout(name)
            task = layout.task_of(index) if layout else None
            if layout is None or task is not None:
                wanted.append(native if task is None else f"{native}_{task}")
        return self._client(target, host).list_starts(wanted) if wanted else []

    def cancel(self, target: Target, native_ids: Sequence[str], indices: Sequence[int] | None, host: Host) -> list[str]:
        client = self._client(target, host)
        wanted = self._cancel_ids(client, native_ids, indices)
        if not wanted:
            return []
        client.cancel(wanted)
        wait_for(lambda: None if self._left(client, wanted) else "gone", GONE_S)
        return [f"{row.id} is {row.state.lower()} on slurm" for row in self._left(client, wanted)]

    def _left(self, client: SlurmClient, wanted: Sequence[str]) -> list[SlurmRow]:
        """The queue's rows of the jobs and tasks in `wanted` that have not ended."""
        rows = client.queue(sorted({each.partition("_")[0] for each in wanted}))
        return [row for row in rows if (row.id in wanted or row.job in wanted) and not row.has_ended]

    def _cancel_ids(self, client: SlurmClient, native_ids: Sequence[str], indices: Sequence[int] | None) -> list[str]:
        if indices is None:
            return list(native_ids)
        wanted = set(indices)
        # A task that serves other indices too goes on; the shim sees the mark of each of its own.
        return [
            row.id
            for row in client.queue(native_ids)
            if row.layout and not row.has_ended and wanted.issuperset(row.layout.indices(row.task))
        ]

    def owned(
        self, target: Target, host: Host, *, owner: str | None = None, job: str | None = None
    ) -> list[OwnedResource]:
        """Slurm's jobs that have not ended; nothing is to be removed of the others."""
        rows = self._client(target, host).queue_owned(everybody=owner is None)
        # The root as `plan` has it, which the names are made of.
        root = str(target.records).rstrip("/") if read_settings(target).host else host.files.root
        return states.to_owned(rows, root, owner, job)

    def remove(self, target: Target, owned: Sequence[OwnedResource], host: Host) -> list[str]:
        return self.cancel(target, [each.native_id for each in owned], None, host)

    def explain(self, target: Target, native: NativeState, host: Host) -> Explanation | None:
        client = self._client(target, host)
        shown = client.show_job(native.native_id)
        if native.state is JobState.PENDING:
            return explain_pending(native, shown, client)
        return explain_failed(native, shown) if native.state.terminal else None

    def read_output(self, target: Target, native: NativeState, folder: str, host: Host) -> str:
        return "\n".join(read_tail(host.files, f"{folder}/slurm/{native.native_id}.log", 100))

    # once more

    def restore_parts(
        self, artefacts: Mapping[str, str], names: Sequence[str], indices: Sequence[int]
    ) -> list[NativePart]:
        parts = []
        for number, (words, artefact, script) in enumerate(render.read_shown(artefacts["sbatch.txt"])):
            layout = states.read_layout(names[number])
            if layout is None:
                layout = Layout(min(indices), 1, max(indices) - min(indices) + 1)
            else:
                tasks = [task for index in indices if (task := layout.task_of(index)) is not None]
                if not tasks:
                    continue
                words = render.cut_array(words, tasks)
            parts.append(_part(names[number], number, layout, artefact, words, script))
        return parts

    # elsewhere

    def export(self, plan: LaunchPlan, folder: Path, snapshot: bytes | None) -> list[Path]:
        from runtime.launchers.slurm.bundle import export_bundle

        return export_bundle(plan, folder, snapshot)

    # rehearsing

    def interrupt(self, target: Target, native_id: str, index: int | None, how: str, host: Host) -> None:
        client = self._client(target, host)
        native = self._member(client, native_id, index)
        if how == "preempt":
            # slurmctld does the same to a preempted job of a partition that requeues: TERM, and back into the queue.
            answer = client.requeue(native)
        elif how == "timeout":
            answer = client.alarm(native)
        else:
            where = next((row.where for row in client.queue([native_id]) if row.id == native), "NODE")
            fact = "only the memory of a running command can be exceeded"
            hint = "let the command take more than resources.memory"
            if how == "node-loss":
                fact = "taking a node down needs an operator, and ends the jobs of others on it"
                hint = f"an operator can: scontrol update nodename={where or 'NODE'} state=down reason=rehearsal"
            raise NotPossible(f"`{how}` cannot be provoked by a user of slurm", facts=[fact], hint=hint)
        if answer.code != 0:
            raise NotPossible(f"slurm refuses to interrupt `{native}`: {_last(answer.err or answer.out)}")

    def _member(self, client: SlurmClient, native_id: str, index: int | None) -> str:
        """The id of the task that serves an index. Never the bare id of an array, which would mean all of it."""
        if "_" in native_id:
            return native_id
        for row in client.queue([native_id]):
            if row.task is None or (index is not None and row.layout and index in row.layout.indices(row.task)):
                return row.id
        raise NotPossible(
            f"no task of `{native_id}` serves index {index} now" if index is not None else f"`{native_id}` is an array",
            hint="name an index that runs: --index N",
        )

    def _client(self, target: Target, host: Host) -> SlurmClient:
        return SlurmClient(host, read_settings(target))


def _part(
    name: str, number: int, layout: Layout | None, artefact: str, words: Sequence[str], script: Sequence[str]
) -> NativePart:
    return NativePart(
        name=name,
        artefact=artefact,
        offset=layout.offset if layout else 0,
        count=layout.count if layout else 1,
        native={"number": number, "words": words, "script": script},
    )


def find_records(target: Target, context: PlanContext) -> str:
    """The record root of a target whose login node is this machine.

    Never a home by itself: its quota is small, and snapshots, logs and outputs are large.
    """
    if target.records:
        return str(Path(os.path.expandvars(target.records)).expanduser())
    for name in _FOLDERS:
        if folder := context.environ.get(name):
            return f"{folder.rstrip('/')}/research-runtime"
    raise NotPossible(
        f"target `{target.name}` has no record root: a folder that this machine and the nodes see",
        facts=[f"none of {', '.join(_FOLDERS)} is set here, and a home is taken only where it is named"],
        hint=f'set records = "/scratch/…" in [tool.runtime.targets.{target.name}]',
    )


def _first_ids(rows: Sequence[SlurmRow]) -> dict[str, str]:
    """Name → id of the oldest job of that name that Slurm did not refuse, before all that have ended."""
    found: dict[str, str] = {}
    # One that has ended may be from before the job's record was removed.
    for row in sorted((row for row in rows if not row.refused), key=lambda row: (row.has_ended, int(row.job))):
        found.setdefault(row.name, row.job)
    return found


def _last(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else ""
