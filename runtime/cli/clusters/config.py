"""`runtime cluster config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from typer import Option

from runtime.cli.clusters.common import OneClusterOption, open_one
from runtime.cli.commands import OutputOption, StackOption
from runtime.cli.output import OutputFormat, print_checks, print_json, print_list
from runtime.clusters.pools import Pool, read_pools


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    cluster: str
    cluster_name: str
    head: str
    zone: str
    image: str
    worker_identity: str
    config_sha256: str
    pools: tuple[Pool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    setting: str
    value: object


def config(
    check: Annotated[bool, Option("--check", help="Ask the head whether it uses these settings.")] = False,
    cluster: OneClusterOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Print what the contract says of a cluster, and check its head.

    With `--check`, the head is asked for the digest of the autoscaler file that it uses, and whether Ray has to be restarted
    for newer files. Exit code 1 if the digest is not the contract's.

    \b
    Examples:
      runtime cluster config
      runtime cluster config --check --stack marin-us-west4
    """
    from runtime.clusters.head_config import check_head, read_head

    chosen, key, each = open_one(stack, cluster)
    if check:
        attributes = read_head(chosen.api, project=chosen.project, zone=each.zone, head=each.head)
        findings = check_head(key, each, attributes, stack=chosen.stack)
        return print_checks(findings, output, name="check", remedy="fix", width=8)
    shown = ClusterConfig(
        cluster=key,
        cluster_name=each.cluster_name,
        head=each.head,
        zone=each.zone,
        image=each.image,
        worker_identity=each.worker_identity,
        config_sha256=each.config_sha256,
        pools=tuple(read_pools(each)),
    )
    if output is OutputFormat.JSON:
        print_json(shown)
        return 0
    lines = [
        _Line(setting=name, value=getattr(shown, name))
        for name in ("cluster_name", "head", "zone", "image", "worker_identity", "config_sha256")
    ]
    lines += [
        _Line(setting=f"pools.{pool.name}.{name}", value=getattr(pool, name))
        for pool in shown.pools
        for name in ("accelerator", "capacity", "min", "max", "buffer")
    ]
    print_list(lines, {"SETTING": "setting", "VALUE": "value"})
    return 0
