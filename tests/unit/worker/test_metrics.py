"""The metrics page, scraped as Prometheus does it."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.errors import InvalidValue, NotPossible
from runtime.reasons import EndReason
from runtime.tasks.model import TaskState
from runtime.worker.metrics import PrometheusMetrics, WorkerMetrics, open_metrics


@pytest.fixture
def metrics() -> Iterator[WorkerMetrics]:
    metrics = open_metrics(("127.0.0.1", 0), queue="gpu")
    yield metrics
    metrics.close()


def scrape(metrics: WorkerMetrics) -> dict[tuple[str, ...], float]:
    """Return sample name and labels, sorted, → value; the queue label is checked and dropped."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=240) as page:
        text = page.read().decode()
    samples: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("runtime_"):
                assert labels.pop("queue") == "gpu"
            samples[(sample.name, *(labels[name] for name in sorted(labels)))] = sample.value
    return samples


def test_gauges_have_the_last_value(metrics: WorkerMetrics) -> None:
    metrics.set_slots(4)
    metrics.set_running(3)
    metrics.set_running(2)
    metrics.set_leases(9)

    samples = scrape(metrics)

    assert samples[("runtime_worker_slots",)] == 4
    assert samples[("runtime_worker_running",)] == 2
    assert samples[("runtime_worker_leases",)] == 9


def test_attempts_are_counted_by_reason_and_timed(metrics: WorkerMetrics) -> None:
    metrics.attempt_ended(EndReason.SUCCEEDED, 0.05)
    metrics.attempt_ended(EndReason.SUCCEEDED, 3)
    metrics.attempt_ended(EndReason.OOM, 100)

    samples = scrape(metrics)

    assert samples[("runtime_attempts_total", "succeeded")] == 2
    assert samples[("runtime_attempts_total", "oom")] == 1
    assert samples[("runtime_attempt_seconds_count",)] == 3
    assert samples[("runtime_attempt_seconds_sum",)] == pytest.approx(103.05)
    assert samples[("runtime_attempt_seconds_bucket", "0.1")] == 1
    assert samples[("runtime_attempt_seconds_bucket", "10.0")] == 2


def test_tasks_are_counted_by_what_became_of_them(metrics: WorkerMetrics) -> None:
    metrics.task_recorded(TaskState.SUCCEEDED)
    metrics.task_recorded(TaskState.FAILED)
    metrics.task_recorded(TaskState.FAILED)
    metrics.task_released(EndReason.PREEMPTED)
    metrics.task_released()
    metrics.task_declined()

    samples = scrape(metrics)

    assert samples[("runtime_tasks_recorded_total", "succeeded")] == 1
    assert samples[("runtime_tasks_recorded_total", "failed")] == 2
    assert samples[("runtime_tasks_released_total", "preempted")] == 1
    assert samples[("runtime_tasks_released_total", "not_started")] == 1
    assert samples[("runtime_tasks_declined_total",)] == 1


def test_every_reason_and_state_is_there_from_the_start(metrics: WorkerMetrics) -> None:
    samples = scrape(metrics)

    assert all(samples[("runtime_attempts_total", reason.value)] == 0 for reason in EndReason)
    states = [state for state in TaskState if state.terminal]
    assert all(samples[("runtime_tasks_recorded_total", state.value)] == 0 for state in states)
    assert ("runtime_tasks_recorded_total", "queued") not in samples


def test_leases_and_latency(metrics: WorkerMetrics) -> None:
    metrics.renewal_failed()
    metrics.lease_lost()
    metrics.lease_lost()
    metrics.attempt_started(timedelta(seconds=2))
    metrics.attempt_started(timedelta(seconds=-5))
    metrics.attempt_started(None)

    samples = scrape(metrics)

    assert samples[("runtime_lease_renewals_failed_total",)] == 1
    assert samples[("runtime_leases_lost_total",)] == 2
    assert samples[("runtime_queue_latency_seconds_count",)] == 2
    assert samples[("runtime_queue_latency_seconds_sum",)] == 2


def test_process_numbers_are_on_the_page(metrics: WorkerMetrics) -> None:
    assert scrape(metrics)[("process_resident_memory_bytes",)] > 1_000_000


def test_two_workers_of_one_process_do_not_mix(metrics: WorkerMetrics) -> None:
    other = open_metrics(("127.0.0.1", 0), queue="gpu")
    other.set_slots(7)
    metrics.set_slots(1)

    assert scrape(other)[("runtime_worker_slots",)] == 7
    assert scrape(metrics)[("runtime_worker_slots",)] == 1
    other.close()


def test_default_address_is_every_interface() -> None:
    metrics = open_metrics(("", 0), queue="gpu")

    assert isinstance(metrics, PrometheusMetrics)
    assert metrics._server.server_address[0] == "0.0.0.0"
    scrape(metrics)
    metrics.close()


def test_closed_page_frees_its_port() -> None:
    first = open_metrics(("127.0.0.1", 0), queue="gpu")
    assert first.port
    first.close()

    second = open_metrics(("127.0.0.1", first.port), queue="gpu")
    scrape(second)
    second.close()


def test_port_in_use_is_explained(metrics: WorkerMetrics) -> None:
    assert metrics.port

    with pytest.raises(NotPossible) as refused:
        open_metrics(("127.0.0.1", metrics.port), queue="gpu")

    assert refused.value.message == f"cannot serve metrics on port {metrics.port}: it is taken"
    assert refused.value.hint == "`--metrics-port 0` takes a free port and says which"


def test_address_of_another_machine_is_explained() -> None:
    with pytest.raises(NotPossible) as refused:
        open_metrics(("192.0.2.1", 0), queue="gpu")

    assert "`192.0.2.1:0`" in refused.value.message


def test_port_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidValue):
        open_metrics(("127.0.0.1", 70_000), queue="gpu")


def test_without_an_address_nothing_is_imported_or_counted() -> None:
    code = (
        "import sys; from runtime.worker.metrics import open_metrics\n"
        "metrics = open_metrics(None, queue='q'); metrics.set_slots(1); metrics.close()\n"
        "assert metrics.port is None\n"
        "loaded = {'prometheus_client', 'http.server', 'socketserver'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_both_kinds_offer_the_same() -> None:
    def names(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert names(PrometheusMetrics) == names(WorkerMetrics) - {"port"}
