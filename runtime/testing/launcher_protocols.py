"""The part of the launchers' suite about what only some launchers can do, and what keeps their jobs going."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from runtime.client.jobs.gc import Garbage, find_garbage, remove
from runtime.client.jobs.launch import carry_out
from runtime.client.jobs.prepare import LaunchOptions, prepare
from runtime.client.jobs.reconcile import keep_target
from runtime.client.jobs.status import read_attempts
from runtime.end_reasons import EndReason
from runtime.jobs import ledger, open_jobs
from runtime.jobs.plan import owner_name
from runtime.jobs.price import CURRENCY, PriceRefused, PriceUnconfirmed
from runtime.jobs.spec import JobSpec, JobState
from runtime.testing.launcher_bench import NAME, Bench, read_log


class ProtocolSuite:
    """The tests of optional Protocols, of the index of open jobs and of its keeper, for `LauncherSuite`."""

    def test_running_job_without_a_record_is_found_by_the_backend_and_ended_and_others_are_left(
        self, bench: Bench
    ) -> None:
        bench.require_owned()
        command = "echo runs; exec sleep"
        kept, stray = (bench.start("sh", "-c", f"{command} {seconds}") for seconds in (600, 601))
        for job in (kept, stray):
            bench.wait_for(lambda job=job: read_log(job) == "runs\n")  # type: ignore[misc]
        stray.files.remove(ledger.job_folder(stray.id))
        place = bench.open_place()

        def find() -> list[Garbage]:
            now = datetime.now(UTC)
            found = find_garbage(place, owner=owner_name(), older_than=timedelta(0), now=now)
            return [each for each in found if each.kind == "native"]

        found = find()
        left = [remove(each, place, owner=owner_name()) for each in found]

        assert [(each.name, each.state) for each in found] == [(stray.id, JobState.RUNNING)]
        assert (left, find()) == ([[]], [])
        assert stray.id not in ledger.list_jobs(place.files)
        assert kept.state() is JobState.RUNNING
        assert kept.cancel() == []

    def test_launch_keeps_to_the_project_s_limit_by_the_launcher_s_price_and_asks(self, bench: Bench) -> None:
        price = bench.require_price()
        known = price.hourly is not None and price.currency == CURRENCY

        bench.limit_price((price.hourly or 1.0) / 2)
        with pytest.raises(PriceRefused):
            bench.start("true")
        bench.limit_price(price.hourly or 1.0)
        unasked = LaunchOptions(base=bench.tree)
        with pytest.raises(PriceUnconfirmed if known else PriceRefused):
            carry_out(prepare(JobSpec(command=("true",)), bench.target, bench.settings, unasked), unasked)

        assert price.hourly is None or price.hourly > 0, "an unknown price is None, and so is that of a free job"
        assert ledger.list_jobs(bench.open_host().files) == []
        if known:
            assert bench.end(bench.start("true")).state is JobState.SUCCEEDED

    def test_notice_of_the_cloud_asks_the_command_to_end_and_the_attempt_is_preempted(self, bench: Bench) -> None:
        metadata = bench.require_notices()
        job = bench.start("sh", "-c", "trap 'echo saved; exit 0' TERM; echo runs; while :; do sleep 0.1; done")
        bench.wait_for(lambda: read_log(job) == "runs\n")

        metadata.announce()
        # This reads files and does not ask the backend, which may start the command again once the notice is gone.
        bench.wait_for(lambda: read_attempts(job.files, job.id, 0)[0].reason is not None)
        metadata.call_off()

        assert read_attempts(job.files, job.id, 0)[0].reason == EndReason.PREEMPTED
        assert "saved" in read_log(job).splitlines()
        assert job.cancel() == []

    def test_job_is_in_the_index_of_open_jobs_until_its_end(self, bench: Bench) -> None:
        job, short = bench.start("sleep", "600"), bench.start("true")
        at_first = open_jobs.list_open(job.files, NAME)

        # These read files, and no client looks for the end of the short job.
        bench.wait_for(lambda: bool(ledger.read_outcomes(job.files, short.id)))
        bench.wait_for(lambda: list(open_jobs.list_open(job.files, NAME)) == [job.id])
        left = job.cancel()
        bench.wait_for(lambda: open_jobs.list_open(job.files, NAME) == {})

        assert (at_first[job.id], left) == ([0], [])

    def test_keeper_leaves_a_job_that_runs_and_takes_it_up_when_its_machine_went(self, bench: Bench) -> None:
        break_job = bench.require_resume()
        job = bench.start("sh", "-c", "echo attempt $RUNTIME_ATTEMPT; [ $RUNTIME_ATTEMPT = 2 ] || exec sleep 600")
        bench.wait_for(lambda: read_log(job) == "attempt 1\n")
        place = bench.open_place()

        before = keep_target(place, bench.settings)
        break_job(job)
        gone = bench.end(job)
        after = keep_target(place, bench.settings)
        ended = bench.end(job)

        assert (gone.state, gone.reason, ended.state) == (JobState.FAILED, EndReason.LOST, JobState.SUCCEEDED)
        assert [(each.job, each.done) for each in (*before.jobs, *after.jobs)] == [
            (job.id, "left"),
            (job.id, "taken_up"),
        ]
        assert (before.problems, after.problems) == ((), ())
        assert (read_log(job), job.attempts()) == ("attempt 1\nattempt 2\n", [1, 2])
