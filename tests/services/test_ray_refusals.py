"""Ray's own launcher of nodes logs what a cloud refused, and the driver finds it there; no Ray is started."""

from __future__ import annotations

import io
import json
import logging
import time
from typing import Any

import pytest

from runtime.launchers.ray.cluster_state import read_log

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:ray")

CAPACITY = 'There is no more capacity in the zone "us-central2-b"; you can try in another zone'
QUOTA = "Quota limit 'TPUV4sPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 32 in zone us-central2-b."


class Pending:
    def dec(self, key: str, count: int) -> None:
        pass


class Provider:
    def __init__(self, problem: Exception) -> None:
        self.problem = problem

    def create_node_with_resources_and_labels(self, *_: Any) -> None:
        raise self.problem


def write_log(problem: Exception) -> str:
    """Return what Ray's launcher logs when its node provider raises `problem`."""
    from ray._private import ray_constants
    from ray.autoscaler._private import node_launcher
    from ray.autoscaler._private.event_summarizer import EventSummarizer

    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter(ray_constants.LOGGER_FORMAT))
    before = node_launcher.logger.level
    node_launcher.logger.addHandler(handler)
    node_launcher.logger.setLevel(logging.INFO)
    try:
        launcher = node_launcher.BaseNodeLauncher(Provider(problem), Pending(), EventSummarizer(), None, index=3)
        types = {"v4": {"node_config": {}, "resources": {"TPU": 4}}}
        launcher.launch_node({"available_node_types": types, "auth": {}, "cluster_name": "c"}, 2, "v4")
    finally:
        node_launcher.logger.removeHandler(handler)
        node_launcher.logger.setLevel(before)
    return text.getvalue()


def http_error(status: int, message: str) -> Exception:
    import httplib2
    from googleapiclient.errors import HttpError

    content = json.dumps({"error": {"code": status, "message": message}}).encode()
    answer = httplib2.Response({"status": status, "content-type": "application/json"})
    error: Exception = HttpError(answer, content, uri="https://tpu.googleapis.com/v2alpha1/x?alt=json")
    return error


def test_refusals_of_google_are_found_in_what_rays_launcher_logs() -> None:
    began = int(time.time())

    # What Ray raises for an operation that failed, and Google's client for an answer of 429.
    log = write_log(Exception({"code": 8, "message": CAPACITY})) + write_log(http_error(429, QUOTA))

    found = read_log(log)
    assert [(each.pool, each.kind, each.text) for each in found] == [
        ("v4", "stock-out", CAPACITY),
        ("v4", "quota", QUOTA),
    ]
    assert all(began <= each.at <= time.time() for each in found)
