"""Names: within Google's limits for every stack name, the same every time, and never shared by two resources."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from infra.naming import CLUSTER_LIMIT, Names, labels, shorten
from runtime.errors import InvalidValue

PLAIN = Names(stack="marin-us-central2", project="hai-gcp-models")

# Any stack name that Pulumi accepts, and any queue name that somebody might choose.
stacks = st.from_regex(r"[A-Za-z0-9_.-]{1,100}", fullmatch=True)
projects = st.from_regex(r"[a-z][a-z0-9-]{4,28}[a-z0-9]", fullmatch=True)
roles = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,80}", fullmatch=True),
    st.text(min_size=1, max_size=80),
    st.sampled_from(["goog", "google", "gcp-", "-", "_", "a", "0", "g00gle", "GOOG-x"]),
)

SLUG = r"[a-z](?:[a-z0-9-]*[a-z0-9])?"
KINDS: dict[str, tuple[Callable[[Names, str], str], str, int, int]] = {
    # kind: (function, Google's pattern, shortest, longest)
    "topic": (Names.topic, r"[A-Za-z][A-Za-z0-9._~%+-]*", 3, 255),
    "dead letters": (Names.dead_letters, r"[A-Za-z][A-Za-z0-9._~%+-]*", 3, 255),
    "subscription": (Names.subscription, r"[A-Za-z][A-Za-z0-9._~%+-]*", 3, 255),
    "bucket": (Names.bucket, r"[a-z0-9][a-z0-9_-]*[a-z0-9]", 3, 63),
    "account": (Names.account, SLUG, 6, 30),
    "role": (Names.role, r"[A-Za-z0-9_.]+", 3, 64),
    "identity pool": (lambda names, _: names.identity_pool(), r"[a-z0-9-]+", 4, 32),
    "repository": (Names.repository, SLUG, 1, 63),
    "secret": (Names.secret, r"[A-Za-z0-9_-]+", 1, 255),
    "network": (lambda names, _: names.network(), SLUG, 1, 63),
    "firewall": (Names.firewall, SLUG, 1, 63),
    "cluster": (Names.cluster, SLUG, 1, CLUSTER_LIMIT),
    "head": (Names.head, SLUG, 1, 63),
}
WITHOUT_ROLE = {"identity pool", "network"}


def made(stack: str, project: str, role: str) -> dict[str, str]:
    """Return the name of every kind."""
    names = Names(stack=stack, project=project)
    return {kind: make(names, role) for kind, (make, *_) in KINDS.items()}


def shared(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """Return the kinds whose names are equal."""
    return {kind for kind, name in one.items() if name == other[kind]}


def is_allowed(kind: str, name: str) -> bool:
    _, pattern, least, most = KINDS[kind]
    googles = name.startswith(("goog", "gcp-")) or "google" in name or "g00gle" in name
    return bool(re.fullmatch(pattern, name)) and least <= len(name) <= most and not googles


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("account", "short"),
        ("account", "a" * 31),
        ("account", "ends-in-dash-"),
        ("account", "1-begins-with-a-digit"),
        ("role", "with-dash"),
        ("bucket", "Upper-case"),
        ("bucket", "my-google-bucket"),
        ("identity pool", "gcp-pool"),
        ("cluster", "c" * (CLUSTER_LIMIT + 1)),
        ("topic", "goog-topic"),
    ],
)
def test_the_judge_of_these_tests_given_a_bad_name_refuses_it(kind: str, name: str) -> None:
    assert not is_allowed(kind, name)


@given(stack=stacks, project=projects, role=roles)
@example(stack=".", project="a00000", role="GCP")
def test_names_of_any_stack_and_role_are_what_google_takes(stack: str, project: str, role: str) -> None:
    names = made(stack, project, role)

    assert {kind: name for kind, name in names.items() if not is_allowed(kind, name)} == {}


@given(stack=stacks, project=projects, role=roles)
def test_names_asked_for_twice_are_the_same(stack: str, project: str, role: str) -> None:
    assert made(stack, project, role) == made(stack, project, role)


@given(stack=stacks, project=projects, one=roles, other=roles)
def test_two_roles_of_a_stack_have_two_names(stack: str, project: str, one: str, other: str) -> None:
    assume(one != other)

    assert shared(made(stack, project, one), made(stack, project, other)) == WITHOUT_ROLE


@given(one=stacks, other=stacks, project=projects)
def test_two_stacks_of_a_project_have_two_names_for_one_role(one: str, other: str, project: str) -> None:
    assume(one != other)

    assert shared(made(one, project, "main"), made(other, project, "main")) == set()


@given(stack=stacks, one=projects, other=projects)
def test_names_that_the_world_has_once_differ_between_projects(stack: str, one: str, other: str) -> None:
    assume(one != other)

    assert shared(made(stack, one, "records"), made(stack, other, "records")) & {"bucket", "head"} == set()


@given(stack=stacks, head=roles)
def test_cluster_leaves_room_for_the_names_that_ray_makes(stack: str, head: str) -> None:
    cluster = Names(stack=stack).cluster(head)

    assert len(f"ray-{cluster}-worker-01234567-compute") <= 63
    assert re.fullmatch(rf"ray-{cluster}-head-[0-9a-f]{{8}}-compute", Names(stack=stack).head(head))


@given(name=st.text(max_size=300), limit=st.integers(12, 255))
def test_shorten_never_passes_its_limit_and_keeps_what_fits(name: str, limit: int) -> None:
    short = shorten(name, limit)

    assert len(short) <= limit
    assert short == name or len(name) > limit


@given(one=st.text(min_size=31, max_size=99), other=st.text(min_size=31, max_size=99))
def test_shorten_of_two_long_names_leaves_two(one: str, other: str) -> None:
    assume(one != other)

    assert shorten(one, 30) != shorten(other, 30)


def test_names_of_a_plain_stack_are_readable() -> None:
    assert {
        "topic": PLAIN.topic("default"),
        "dead": PLAIN.dead_letters("default"),
        "subscription": PLAIN.subscription("default"),
        "bucket": PLAIN.bucket("records"),
        "account": PLAIN.account_email("worker"),
        "role": PLAIN.role("ray-head"),
        "pool": PLAIN.identity_pool(),
        "repository": PLAIN.repository("images"),
        "secret": PLAIN.secret("hf-token"),
        "network": PLAIN.network(),
        "firewall": PLAIN.firewall("internal"),
        "cluster": PLAIN.cluster("main"),
    } == {
        "topic": "marin-us-central2-default",
        "dead": "marin-us-central2-default-dead",
        "subscription": "marin-us-central2-default",
        "bucket": "hai-gcp-models-marin-us-central2-records",
        "account": "marin-us-central2-worker@hai-gcp-models.iam.gserviceaccount.com",
        "role": "marin_us_central2_ray_head",
        "pool": "marin-us-central2-ci",
        "repository": "marin-us-central2-images",
        "secret": "marin-us-central2-hf-token",
        "network": "marin-us-central2",
        "firewall": "marin-us-central2-internal",
        "cluster": "marin-us-central2-main",
    }


@pytest.mark.parametrize(
    "name_of", [lambda names: names.bucket("records"), lambda names: names.account_email("worker")]
)
def test_name_that_carries_the_project_without_one_is_refused(name_of: Callable[[Names], str]) -> None:
    with pytest.raises(InvalidValue) as refused:
        name_of(Names(stack="phoebe"))

    assert (refused.value.field, refused.value.value) == ("project", None)


@given(stack=stacks)
def test_labels_of_any_stack_obey_googles_rules(stack: str) -> None:
    made = labels(stack, {"team": "vision"})

    assert made.keys() == {"managed-by", "stack", "team"}
    for key, value in made.items():
        assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key)
        assert re.fullmatch(r"[a-z0-9_-]{0,63}", value)


def test_labels_whose_own_keys_are_set_by_a_stack_keep_ours() -> None:
    assert labels("dev", {"stack": "other", "managed-by": "me", "team": "x"}) == {
        "managed-by": "research-runtime",
        "stack": "dev",
        "team": "x",
    }
