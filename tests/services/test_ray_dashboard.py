"""Ray's own code writes what its dashboard answers, and `runtime cluster status` reads it; no Ray is started."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from runtime.clusters.ray_view import RayView, parse_ray

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]

HEAD, BUSY, IDLE, LOST = (bytes([number]) * 28 for number in range(1, 5))


def answered(**data: Any) -> dict[str, Any]:
    """Return the body of the dashboard's answer with `data`."""
    from ray.dashboard.optional_utils import rest_response
    from ray.dashboard.utils import HTTPStatusCode

    body = rest_response(status_code=HTTPStatusCode.OK, message="", **data).text
    assert body is not None
    return dict(json.loads(body))


def node_summary(node_id: bytes, address: str, *, head: bool = False, alive: bool = True) -> dict[str, Any]:
    from ray.core.generated import gcs_pb2
    from ray.dashboard.modules.node.node_head import _gcs_node_info_to_dict

    state = gcs_pb2.GcsNodeInfo.GcsNodeState.ALIVE if alive else gcs_pb2.GcsNodeInfo.GcsNodeState.DEAD
    message = gcs_pb2.GcsNodeInfo(node_id=node_id, node_manager_address=address, is_head_node=head, state=state)
    return {"ip": address, "raylet": _gcs_node_info_to_dict(message)}


def test_answers_of_rays_dashboard_are_read_as_they_are() -> None:
    from ray.autoscaler._private.load_metrics import LoadMetrics

    metrics = LoadMetrics()
    hosts = {"10.0.0.2": (HEAD, 0.0), "10.0.0.3": (BUSY, 4.0), "10.0.0.4": (IDLE, 0.0)}
    for address, (node_id, used) in hosts.items():
        total = {"CPU": 120.0, "TPU": 4.0, "object_store_memory": 9.0, f"node:{address}": 1.0}
        free = {**total, "TPU": 4.0 - used, "object_store_memory": 1.0}
        metrics.update(address, node_id, total, free, 0.0, waiting_bundles=[{"TPU": 4.0}], infeasible_bundles=[])
    report = json.loads(json.dumps(dataclasses.asdict(metrics.summary())))
    nodes = [
        node_summary(HEAD, "10.0.0.2", head=True),
        node_summary(BUSY, "10.0.0.3"),
        node_summary(IDLE, "10.0.0.4"),
        node_summary(LOST, "10.0.0.5", alive=False),
    ]

    view = parse_ray(
        answered(summary=nodes, node_logical_resources={}),
        answered(
            autoscaling_status=None, autoscaling_error=None, cluster_status={"load_metrics_report": report, "time": 1.0}
        ),
    )

    assert view == RayView(
        alive=frozenset({"10.0.0.3", "10.0.0.4"}), busy=frozenset({"10.0.0.3"}), wanted={'{"TPU": 4.0}': 1}
    )


def test_answers_before_the_autoscalers_first_report_are_read() -> None:
    view = parse_ray(
        answered(summary=[node_summary(IDLE, "10.0.0.4")], node_logical_resources={}),
        answered(autoscaling_status=None, autoscaling_error="no quota", cluster_status=None),
    )

    assert view == RayView(alive=frozenset({"10.0.0.4"}), error="no quota")
