"""Slurm's output and our interpretation. The texts were captured from Slurm 22.05, with its tricky parts: reasons with
blanks and commas, `CANCELLED by 0`, waiting arrays on one line, jobs that sbatch refused but that are listed anyway,
and accounting that lags behind the queue."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.client.jobs.status import AttemptView, join_starts
from runtime.end_reasons import EndReason
from runtime.jobs.plan import NativeState, OwnedResource
from runtime.jobs.spec import JobState
from runtime.launchers.slurm.client import is_no_answer, read_id
from runtime.launchers.slurm.explain import (
    OF_QOS,
    PENDING,
    describe_nodes,
    explain_failed,
    explain_pending,
    find_exceeded,
    find_sentence,
    read_amounts,
    read_limits,
    read_minutes,
)
from runtime.launchers.slurm.states import (
    STATES,
    Layout,
    SlurmRow,
    expand_tasks,
    judge_row,
    merge_rows,
    native_name,
    parse_sacct,
    parse_squeue,
    parse_starts,
    read_layout,
    to_owned,
    to_states,
)

SQUEUE = """\
19|N/A|crun|CANCELLED|n2|2026-11-21T12:02:29|None
18|N/A|cpend|CANCELLED||2026-11-21T12:02:28|JobHeldUser
1|N/A|ok|COMPLETED|n[1-2]|2026-11-21T12:01:52|None
30|4|arr|COMPLETED|n4|2026-11-21T12:02:37|None
7|N/A|refused|FAILED||2026-11-21T12:01:52|BadConstraints
15|N/A|exit3|FAILED|n1|2026-11-21T12:02:28|NonZeroExitCode
20|N/A|nofolder|FAILED|n2|2026-11-21T12:02:29|JobLaunchFailure
26|N/A|nodefail|NODE_FAIL|n4|2026-11-21T12:02:29|NodeDown
6|N/A|toolong|PENDING||N/A|PartitionTimeLimit
29|N/A|depnever|PENDING||N/A|DependencyNeverSatisfied
22|N/A|reqhold|PENDING||N/A|job requeued in held state
23|N/A|special|SPECIAL_EXIT||N/A|job requeued in held state
24|N/A|pre|PENDING||2026-11-21T12:32:00|Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions
17|N/A|limit|TIMEOUT|n1|2026-11-21T12:02:28|TimeLimit
37|N/A|urg1|RUNNING|n[1-2]|2026-11-21T12:03:52|None
slurm_load_jobs error: Invalid job id specified
"""

SACCT = """\
1|ok|COMPLETED|0:0|n[1-2]|2026-11-21T12:01:52|None
8|refused|FAILED|1:0|None assigned|2026-11-21T12:01:52|None
3_2|arr|COMPLETED|0:0|n1|2026-11-21T12:02:01|JobArrayTaskLimit
40_[3-4%2]|arr|PENDING|0:0|None assigned|Unknown|JobArrayTaskLimit
15|exit3|FAILED|3:0|n1|2026-11-21T12:02:28|None
16|killed|FAILED|0:9|n1|2026-11-21T12:02:28|None
17|limit|TIMEOUT|0:0|n1|2026-11-21T12:02:28|None
19|crun|CANCELLED by 0|0:0|n2|2026-11-21T12:02:29|None
20|nofolder|FAILED|0:53|n2|2026-11-21T12:02:29|None
26|nodefail|NODE_FAIL|0:0|n4|2026-11-21T12:02:29|None
51|pre|PREEMPTED|0:0|n1|2026-11-21T12:02:29|None
52|big|OUT_OF_MEMORY|0:125|n1|2026-11-21T12:02:29|None
53|late|DEADLINE|0:0|None assigned|Unknown|None
54|late2|DEADLINE|0:15|n3|2026-11-21T12:02:29|None
"""


def ended(text: str) -> dict[str, tuple[JobState, EndReason | None, int | None]]:
    return {each.native_id: (each.state, each.reason, each.exit_code) for each in to_states(parse_sacct(text))}


def test_squeue_as_captured_gives_every_job_its_state_and_reason() -> None:
    found = {row.name: judge_row(row) for row in parse_squeue(SQUEUE)}

    failed = JobState.FAILED
    assert found == {
        "crun": (JobState.CANCELLED, EndReason.CANCELLED),
        "cpend": (JobState.CANCELLED, EndReason.CANCELLED),
        "ok": (JobState.SUCCEEDED, EndReason.SUCCEEDED),
        "arr": (JobState.SUCCEEDED, EndReason.SUCCEEDED),
        "refused": (failed, EndReason.CONFIG_INVALID),
        "exit3": (failed, EndReason.APP_FAILED),
        "nofolder": (failed, EndReason.SETUP_FAILED),
        "nodefail": (failed, EndReason.NODE_FAILED),
        "toolong": (JobState.PENDING, None),
        "depnever": (JobState.PENDING, None),
        "reqhold": (JobState.PENDING, None),
        "special": (JobState.PENDING, None),
        "pre": (JobState.PENDING, None),
        "limit": (failed, EndReason.TIMEOUT),
        "urg1": (JobState.RUNNING, None),
    }


def test_sacct_as_captured_gives_every_end_its_reason_and_exit_code() -> None:
    failed = JobState.FAILED

    assert ended(SACCT) == {
        "1": (JobState.SUCCEEDED, EndReason.SUCCEEDED, 0),
        "8": (failed, EndReason.CONFIG_INVALID, 1),
        "3_2": (JobState.SUCCEEDED, EndReason.SUCCEEDED, 0),
        "40_3": (JobState.UNKNOWN, None, None),
        "40_4": (JobState.UNKNOWN, None, None),
        "15": (failed, EndReason.APP_FAILED, 3),
        "16": (failed, EndReason.APP_FAILED, 137),
        "17": (failed, EndReason.TIMEOUT, 0),
        "19": (JobState.CANCELLED, EndReason.CANCELLED, 0),
        "20": (failed, EndReason.SETUP_FAILED, 181),
        "26": (failed, EndReason.NODE_FAILED, 0),
        "51": (failed, EndReason.PREEMPTED, 0),
        "52": (failed, EndReason.OOM, 253),
        "53": (failed, EndReason.NO_CAPACITY, 0),
        "54": (failed, EndReason.TIMEOUT, 143),
    }


def test_every_state_of_slurm_is_mapped_and_every_end_has_a_reason() -> None:
    words = (
        "BOOT_FAIL CANCELLED COMPLETED CONFIGURING COMPLETING DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PENDING PREEMPTED"
    )
    words += (
        " RUNNING RESV_DEL_HOLD REQUEUE_FED REQUEUE_HOLD REQUEUED RESIZING REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT"
    )
    words += " STOPPED SUSPENDED TIMEOUT LAUNCH_FAILED POWER_UP_NODE RECONFIG_FAIL UPDATE_DB EXPEDITING"

    assert set(words.split()) == set(STATES)
    assert [word for word, (state, _) in STATES.items() if state is JobState.UNKNOWN] == []
    assert [word for word, (state, reason) in STATES.items() if state.terminal != (reason is not None)] == []


def test_reason_of_a_wait_is_not_told_of_a_job_that_has_ended() -> None:
    rows = "1|N/A|a|COMPLETED|n1|x|BeginTime\n2|N/A|b|PENDING||x|BeginTime\n3|N/A|c|FAILED|n1|x|NonZeroExitCode\n"

    assert [each.raw for each in to_states(parse_squeue(rows))] == [
        "COMPLETED",
        "PENDING/BeginTime",
        "FAILED/NonZeroExitCode",
    ]


def test_state_of_a_later_slurm_concludes_nothing() -> None:
    assert judge_row(SlurmRow("1", None, "x", "TELEPORTED", "", "", "")) == (JobState.UNKNOWN, None)


def test_queue_counts_while_a_job_lives_and_accounting_knows_how_it_ended() -> None:
    queue = parse_squeue(
        "1|N/A|a|RUNNING|n1|x|None\n2|N/A|b|FAILED|n1|x|NonZeroExitCode\n3|N/A|c|COMPLETED|n1|x|None\n"
    )
    accounting = parse_sacct("1|a|COMPLETED|0:0|n1|x|None\n2|b|FAILED|3:0|n1|x|None\n3|c|RUNNING|0:0|n1|x|None\n")

    found = {each.native_id: (each.state, each.exit_code) for each in to_states(merge_rows(queue, accounting))}

    assert found == {
        "1": (JobState.RUNNING, None),
        "2": (JobState.FAILED, 3),
        "3": (JobState.SUCCEEDED, None),
    }


def test_job_that_only_accounting_takes_to_be_running_is_unknown() -> None:
    (found,) = to_states(parse_sacct("1|a|RUNNING|0:0|n1|x|None\n"))

    assert (found.state, found.message) == (JobState.UNKNOWN, "accounting says RUNNING and the queue has no such job")


def test_task_of_an_array_is_told_of_each_index_that_it_serves() -> None:
    name = native_name("j-0123", "/scratch", 1, Layout(10, 4, 10))

    found = list(to_states(parse_squeue(f"7|2|{name}|RUNNING|n1|x|None\n7|0|{name}|PENDING||x|Priority\n")))

    assert [(each.native_id, each.index, each.state) for each in found] == [
        ("7_2", 18, JobState.RUNNING),
        ("7_2", 19, JobState.RUNNING),
        *[("7_0", index, JobState.PENDING) for index in range(10, 14)],
    ]


@given(
    st.integers(0, 99),
    st.none() | st.builds(Layout, st.integers(0, 10_000), st.integers(1, 50), st.integers(1, 2_000)),
)
def test_name_of_a_part_says_what_it_serves(part: int, layout: Layout | None) -> None:
    name = native_name("j-" + "0123456789ab" * 2, "/scratch/me", part, layout)

    assert name.startswith(f"j-{'0123456789ab' * 2}.")
    assert read_layout(name) == read_layout(f"{name}.e3") == layout
    assert name != native_name("j-" + "0123456789ab" * 2, "/scratch/you", part, layout)
    if layout:
        served = [index for task in range(-(-layout.count // layout.each)) for index in layout.indices(task)]
        assert served == list(range(layout.offset, layout.offset + layout.count))
        assert layout.task_of(layout.indices(0)[0]) == 0


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("N/A", [None]),
        ("7", [7]),
        ("[0-3,7%2]", [0, 1, 2, 3, 7]),
        ("0-8:4", [0, 4, 8]),
        ("[5]", [5]),
    ],
)
def test_tasks_are_read_as_slurm_writes_them(text: str, tasks: list[int | None]) -> None:
    assert expand_tasks(text) == tasks


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("1234\n", "1234"),
        ("1234;cluster\n", "1234"),
        ("Welcome! 2 jobs are yours\n 99 bottles\nSubmitted batch job 12\n", "12"),
        ("sbatch: your account has 500 hours\n77\nthank you\n", "77"),
        ("nothing here\n", None),
    ],
)
def test_id_is_the_last_line_of_sbatch_that_looks_like_one(said: str, found: str | None) -> None:
    assert read_id(said) == found


def test_controller_that_was_not_heard_is_told_from_one_that_refused() -> None:
    assert is_no_answer(
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    )
    assert is_no_answer("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    assert not is_no_answer("sbatch: error: invalid partition specified: nope")


@pytest.mark.parametrize(
    ("reason", "begin"),
    [
        ("QOSMaxJobsPerUserLimit", "QOSMax"),
        ("QOSGrpGRES", "QOSGrp"),
        ("AssocGrpCPUMinutesLimit", "AssocGrp"),
        ("ReqNodeNotAvail, UnavailableNodes:n4", "ReqNodeNotAvail"),
        ("launch failed requeued held", "launch failed requeued held"),
        ("launch_failed_requeued_held", "launch failed requeued held"),
        ("DependencyNeverSatisfied", "DependencyNeverSatisfied"),
        ("Priority", "Priority"),
    ],
)
def test_reason_of_a_wait_has_its_sentence(reason: str, begin: str) -> None:
    assert find_sentence(reason) == PENDING[begin]


def test_reason_that_is_not_known_is_told_as_it_is() -> None:
    assert find_sentence("MoonIsFull") == ("slurm says why it waits: MoonIsFull", None)


def test_explanations_name_what_was_seen() -> None:
    native = NativeState(native_id="7", index=None, state=JobState.PENDING, raw="PENDING/JobHeldUser")
    shown = (
        "JobId=7 JobName=x Reason=JobHeldUser Dependency=(null) StartTime=Unknown TRES=cpu=1,mem=2G Partition=debug\n"
    )

    waits = explain_pending(native, shown)
    over = explain_failed(
        NativeState(
            native_id="8",
            index=None,
            state=JobState.FAILED,
            reason=EndReason.TIMEOUT,
            raw="TIMEOUT/TimeLimit",
            where="n1",
        ),
        "JobId=8 TimeLimit=00:01:00 RunTime=00:01:21\n",
    )

    assert (waits.sentence, waits.hint) == ("it is held", "scontrol release 7")
    assert waits.evidence == (
        "slurm: 7 is PENDING, reason JobHeldUser",
        "it asks for cpu=1,mem=2G, of partition debug",
    )
    assert over is not None
    assert over.evidence == ("slurm: 8 is TIMEOUT/TimeLimit", "node n1", "time limit 00:01:00, ran 00:01:21")


def test_nodes_of_a_sort_are_one_line_whatever_they_do() -> None:
    listed = (
        "debug*|mixed|4|4000|gpu:a100:2|(null)|1\n"
        "debug*|allocated|4|4000|gpu:a100:2|(null)|3\n"
        "big|down*|64|512000|(null)|avx512|1\n"
    )

    assert describe_nodes(listed) == [
        "big: 1 node of 64 CPUs, 512000 MB, avx512 (1 down)",
        "debug: 4 nodes of 4 CPUs, 4000 MB, gpu:a100:2 (3 allocated, 1 mixed)",
    ]
    assert describe_nodes(listed, "debug") == describe_nodes(listed)[1:]
    assert describe_nodes("slurm_load_node error\n") == []


# `sacct --duplicates` of a preempted job, of one whose node failed, of an array member, and of waiting or running jobs.
STARTS = """\
1|PREEMPTED|1795332334|1795332338
3|NODE_FAIL|1795332334|1795332337
2_0|PREEMPTED|1795332334|1795332338
2_1|RUNNING|1795332340|Unknown
3|COMPLETED|1795332354|1795332354
1|REQUEUED|1795332344|1795332349
2_0|PENDING|Unknown|Unknown
1|FAILED|1795332355|1795332355
14|CANCELLED by 0|1795332368|1795332369
"""


def test_starts_as_captured_have_the_reason_that_ended_each_and_none_for_what_ended_by_itself() -> None:
    starts = parse_starts(STARTS)

    assert [(each.native_id, each.raw, each.reason) for each in starts] == [
        ("1", "PREEMPTED", EndReason.PREEMPTED),
        ("3", "NODE_FAIL", EndReason.NODE_FAILED),
        ("2", "PREEMPTED", EndReason.PREEMPTED),
        ("2", "RUNNING", None),
        ("1", "REQUEUED", EndReason.PREEMPTED),
        ("3", "COMPLETED", None),
        ("1", "FAILED", None),
        ("14", "CANCELLED", EndReason.CANCELLED),
    ]
    assert [(each.began_at.timestamp(), each.ended_at is None) for each in starts][3:5] == [
        (1795332340, True),
        (1795332344, False),
    ]


@pytest.mark.parametrize("skew_s", [0, 20, -20])
def test_attempts_are_joined_with_the_starts_that_they_ran_in(skew_s: int) -> None:
    """Covers an attempt without a record, several in one start, and clocks of nodes that differ from Slurm's."""

    def attempt(number: int, native: str, began: float, ended: float | None, reason: str | None) -> AttemptView:
        at = [None if each is None else datetime.fromtimestamp(each + skew_s, UTC) for each in (began, ended)]
        return AttemptView(
            index=0, attempt=number, native=native, host="n1", started_at=at[0], ended_at=at[1], reason=reason,
            exit_code=143, message="asked to stop by SIGTERM",
        )  # fmt: skip

    attempts = [
        attempt(1, "1", 1000, 1050, "stopped"),
        attempt(2, "1", 1101, 1150, "app_failed"),
        attempt(3, "1", 1151, 1190, "stopped"),
        attempt(4, "1", 1301, None, "lost"),
        attempt(5, "1", 1501, 1505, "stopped"),
        attempt(6, "9", 1501, 1505, "stopped"),
    ]
    starts = parse_starts("1|PREEMPTED|999|1050\n1|REQUEUED|1100|1191\n1|NODE_FAIL|1300|1400\n1|COMPLETED|1500|1600\n")

    joined = join_starts(attempts, starts, "slurm")

    assert [each.reason for each in joined] == [
        "preempted", "app_failed", "preempted", "node_failed", "stopped", "stopped"
    ]  # fmt: skip
    assert [each.message for each in joined][3:5] == ["slurm says of that start: NODE_FAIL", "asked to stop by SIGTERM"]


def test_attempt_that_knows_its_start_is_joined_with_it_though_another_is_nearer() -> None:
    """On a busy node, the attempt began long after its start, and ended shortly before the next."""

    def attempt(number: int, restarts: int | None, began: float) -> AttemptView:
        return AttemptView(
            index=1, attempt=number, native="1", host="n1", started_at=datetime.fromtimestamp(began, UTC),
            ended_at=datetime.fromtimestamp(began + 0.5, UTC), reason="stopped", exit_code=143, message="",
            restarts=restarts,
        )  # fmt: skip

    starts = parse_starts("1_1|PREEMPTED|1000|1001\n1_1|NODE_FAIL|1008|1009\n1_1|COMPLETED|1020|1021\n")

    def told(*restarts: int | None) -> list[str]:
        attempts = [attempt(1, restarts[0], 1007), attempt(2, restarts[1], 1008)]
        return [str(each.reason) for each in join_starts(attempts, starts, "slurm")]

    assert told(0, 1) == ["preempted", "node_failed"]
    assert told(None, None) == ["stopped", "node_failed"]
    # If accounting lost its rows, it reports nothing about this start rather than about another.
    assert told(7, 1) == ["stopped", "node_failed"]


QOS = "cpu=2,mem=1G|gres/gpu=1|cpu=3|||00:05:00\n"
ASKED = "cpu=4,mem=800M,node=1,billing=4,gres/gpu=2"


def exceeded(asked: str, *, nodes: int = 1, minutes: float | None = 3) -> list[str]:
    known = read_limits(QOS, OF_QOS, "QOS `high`")
    return list(find_exceeded(known, read_amounts(asked), nodes, minutes))


def test_limit_that_a_job_exceeds_by_itself_is_told_with_what_it_asks_for() -> None:
    assert exceeded(ASKED) == [
        "QOS `high` allows cpu=2 for a job, and it asks for cpu=4",
        "QOS `high` allows gres/gpu=1 for a node of a job, and it asks for gres/gpu=2",
        "QOS `high` allows cpu=3 for all jobs of a user, and it asks for cpu=4",
    ]
    assert exceeded("cpu=1,mem=2G") == ["QOS `high` allows mem=1G for a job, and it asks for mem=2G"]
    assert exceeded("cpu=1", minutes=30) == ["QOS `high` allows a job 5m, and its time limit is 30m"]


def test_limit_that_a_job_keeps_to_by_itself_may_be_met_later() -> None:
    assert exceeded("cpu=2,mem=1024M,gres/gpu=2", nodes=2, minutes=5) == []
    assert exceeded("cpu=1", minutes=None) == []
    assert read_limits("||||||\nslurm says something else\n", OF_QOS, "QOS `low`") == []


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("5", 5), ("00:05:00", 5), ("1-12:00:00", 2160), ("2-00:00:00", 2880), ("10:30", 10.5), ("UNLIMITED", None)],
)
def test_times_of_slurm_are_read_as_minutes(text: str, minutes: float | None) -> None:
    assert read_minutes(text) == minutes


# what is ours, by name and comment

OURS = "j-0123456789abcdef01234567"


def test_jobs_of_a_record_root_that_have_not_ended_are_ours_each_array_once() -> None:
    single, other = native_name(OURS, "/r", 0, None), native_name(OURS, "/elsewhere", 0, None)
    array = native_name("j-aa", "/r", 1, Layout(0, 1, 8))
    text = (
        f"11|RUNNING|1769860800|u1|{single}|research-runtime/ada\n"
        f"12|PENDING|1769860860|u1|{array}|research-runtime/ada\n"
        f"12|RUNNING|1769860860|u1|{array}|research-runtime/ada\n"
        f"13|RUNNING|1769860800|u1|{other}|research-runtime/ada\n"
        f"14|COMPLETED|1769860800|u1|{single}|research-runtime/ada\n"
        f"15|RUNNING|1769860800|u1|train|research-runtime/ada\n"
        f"16|RUNNING|1769860800|u1|{single}.e2|research-runtime/eve\n"
        f"17|RUNNING|1769860800|ada|{single}|what | a site wrote\n"
        f"18|RUNNING|N/A|u1|{single}|research-runtime/ada\n"
        "slurm_load_jobs error\n"
    )
    start = datetime(2026, 1, 31, 12, tzinfo=UTC)

    found = to_owned(text, "/r", "ada", None)

    assert found == [
        OwnedResource(job=OURS, native_id="11", what="slurm job", live=True, since=start),
        OwnedResource(job="j-aa", native_id="12", what="slurm job", live=True, since=start.replace(minute=1)),
        OwnedResource(job=OURS, native_id="17", what="slurm job", live=True, since=start),
    ]
    assert [each.native_id for each in to_owned(text, "/r", None, OURS)] == ["11", "16", "17"]
    assert to_owned(text, "/r", "bob", None) == []
