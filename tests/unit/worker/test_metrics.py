"""The metrics page, scraped as Prometheus does it."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.cli.main import main
from runtime.cli.worker import build_parser, read_options
from runtime.end_reasons import EndReason
from runtime.errors import InvalidValue, NotPossible, RequestRefused
from runtime.tasks.model import TaskState
from runtime.testing import sample_task
from runtime.worker.metrics import PrometheusMetrics, WorkerMetrics, open_metrics
from tests.verbs_support import Bench


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


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


def test_default_address_is_this_machine_alone() -> None:
    metrics = open_metrics(("", 0), queue="gpu")

    assert isinstance(metrics, PrometheusMetrics)
    assert metrics._server.server_address[0] == "127.0.0.1"
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


@pytest.mark.parametrize("host", ["no host", "no-such-host.invalid", "a" * 300, "::1::", "fe80::1%nowhere"])
def test_host_that_is_none_is_explained_with_a_next_step(host: str) -> None:
    with pytest.raises(NotPossible) as refused:
        open_metrics((host, 0), queue="gpu")

    assert "`--metrics-host 127.0.0.1`" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:{port}/metrics"),
        ("127.0.0.1", "http://127.0.0.1:{port}/metrics"),
        ("localhost", "http://localhost:{port}/metrics"),
        ("0.0.0.0", "http://0.0.0.0:{port}/metrics"),
        pytest.param("::1", "http://[::1]:{port}/metrics", marks=NEEDS_IPV6),
        pytest.param("[::1]", "http://[::1]:{port}/metrics", marks=NEEDS_IPV6),
    ],
)
def test_page_is_served_at_the_address_that_is_named_and_by_default_here_alone(host: str, url: str) -> None:
    metrics = open_metrics((host, 0), queue="gpu")
    try:
        assert metrics.url == url.format(port=metrics.port)
        with urllib.request.urlopen(metrics.url, timeout=240) as page:
            assert b"runtime_worker_slots" in page.read()
    finally:
        metrics.close()


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--metrics-port", "0"], ("127.0.0.1", 0)),
        (["--metrics-port", "9100", "--metrics-host", "0.0.0.0"], ("0.0.0.0", 9100)),
        (["--metrics-port", "9100", "--metrics-host", "::"], ("::", 9100)),
        ([], None),
    ],
)
def test_option_serves_on_this_machine_unless_a_host_is_named(
    words: list[str], address: tuple[str, int] | None
) -> None:
    assert read_options(build_parser().parse_args(words)).metrics_address == address


def test_host_without_a_port_is_refused() -> None:
    with pytest.raises(RequestRefused, match="goes with `--metrics-port`"):
        read_options(build_parser().parse_args(["--metrics-host", "0.0.0.0"]))


def test_worker_whose_port_is_taken_leases_nothing(
    metrics: WorkerMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path))
    bench = Bench.sqlite(tmp_path, "local.db")
    bench.put(sample_task())

    code = main(["worker", "--once", "--metrics-port", str(metrics.port)])

    assert code == 2
    assert "hint: `--metrics-port 0` takes a free port and says which" in capsys.readouterr().err
    depth = bench.queue().depth()
    assert depth is not None
    assert depth.ready == 1
    assert list(bench.records.workers()) == []
    bench.close()


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

    assert names(PrometheusMetrics) == names(WorkerMetrics) - {"port", "url"}
