"""The words of the ways to a head and its nodes."""

from __future__ import annotations

import shlex

from runtime.stack.iap_ssh import HeadWay, render_node_ssh, render_proxy, render_ssh

WAY = HeadWay(head="ray-m-head-01-compute", project="p-1", zone="us-central2-b")
PROXY = "gcloud compute start-iap-tunnel ray-m-head-01-compute %p --listen-on-stdin --project p-1 --zone us-central2-b"
ALIVE = ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]


def test_proxy_leads_through_the_identity_aware_proxy() -> None:
    assert render_proxy(WAY) == PROXY


def test_ssh_without_a_command_is_a_login() -> None:
    assert render_ssh(WAY, terminal=True) == ["ssh", "-o", f"ProxyCommand={PROXY}", *ALIVE, "-t", WAY.head]


def test_ssh_with_a_command_gives_the_heads_shell_one_quoted_word() -> None:
    way = HeadWay(head="h", project="p", zone="z", user="ada_example_org", options=("-F", "config"))

    words = render_ssh(way, ["grep", "a b", "it's"])

    assert words[:3] == ["ssh", "-F", "config"]
    assert words[-4:-1] == ["-l", "ada_example_org", "h"]
    assert shlex.split(words[-1]) == ["grep", "a b", "it's"]


def test_ssh_with_a_forward_and_no_command_only_forwards() -> None:
    words = render_ssh(WAY, forwards=[(8300, 8265)])

    forward = ["-o", "ExitOnForwardFailure=yes", "-L", "127.0.0.1:8300:127.0.0.1:8265", "-N"]
    assert words == ["ssh", "-o", f"ProxyCommand={PROXY}", *ALIVE, *forward, WAY.head]


def test_ssh_to_a_node_leads_over_the_head_and_quotes_twice() -> None:
    words = render_ssh(WAY, render_node_ssh("10.64.0.9", ["echo", "a b"]))

    on_head = shlex.split(words[-1])
    assert on_head[:4] == ["sudo", "ssh", "-i", "/etc/runtime-ray/ssh/id_ed25519"]
    assert on_head[-2] == "ray@10.64.0.9"
    assert shlex.split(on_head[-1]) == ["echo", "a b"]
