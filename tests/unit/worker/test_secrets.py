"""The cache of a worker's secrets: how long values, refusals and failures hold, and what is read again when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from runtime.errors import InfrastructureFailure, InvalidContract, NotPossible, RequestRefused, RuntimeFailure, may_pass
from runtime.outputs import SecretOutput, StackOutputs, is_free_variable
from runtime.stack.secret_selection import NotGranted, check_named, choose, find_granted
from runtime.testing import FakeClock
from runtime.worker.secrets import FAILED_FOR_S, LIFETIME_S, REFUSED_FOR_S, AttemptSecrets, Values
from tests.fakes.google import GoogleServer
from tests.services_support import wait_readable

CANARY = "hf_canary_16180339"
SECRETS = {
    "wandb": SecretOutput(resource="projects/p/secrets/wandb", env="WANDB_API_KEY", attempts="named"),
    "hf-token": SecretOutput(resource="projects/p/secrets/hf-token", env="HF_TOKEN", attempts="all"),
    "deploy": SecretOutput(resource="projects/p/secrets/deploy", env="DEPLOY_KEY"),
}
STACK = StackOutputs(stack="dev", secrets=SECRETS)
HF = ("hf-token",)


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    server = GoogleServer().start()
    server.put_secret("hf-token", CANARY.encode())
    server.put_secret("wandb", b"w-1")
    yield server
    server.stop()
    assert server.refused == []


class Cache:
    def __init__(self, google: GoogleServer, outputs: StackOutputs = STACK) -> None:
        self.clock, self.now = FakeClock(), outputs
        self.secrets = AttemptSecrets(outputs, server=google.url, find_outputs=lambda: self.now, clock=self.clock)

    def fetch(self, names: tuple[str, ...] = HF) -> Values | RuntimeFailure:
        found: list[Values | RuntimeFailure] = []
        self.secrets.fetch(names, found.append)
        fd = self.secrets.calls.fd
        assert fd is not None
        while not found:
            wait_readable(fd)
            self.secrets.calls.collect()
        return found[0]


@pytest.fixture
def cache(google: GoogleServer) -> Iterator[Cache]:
    made = Cache(google)
    yield made
    made.secrets.close()


def test_values_hold_for_minutes_from_the_question_on(cache: Cache) -> None:
    assert cache.secrets.find(HF) is None
    assert cache.fetch() == {"HF_TOKEN": CANARY}

    cache.clock.advance(seconds=LIFETIME_S - 1)
    assert cache.secrets.find(HF) == {"HF_TOKEN": CANARY}
    cache.clock.advance(seconds=1)
    assert cache.secrets.find(HF) is None


def test_new_version_is_read_after_the_lifetime(cache: Cache, google: GoogleServer) -> None:
    cache.fetch()
    google._add_version("projects/p/secrets/hf-token", b"newer")
    cache.clock.advance(seconds=LIFETIME_S)

    assert cache.fetch() == {"HF_TOKEN": "newer"}


@pytest.mark.parametrize(
    ("status", "reason", "holds_s", "passing"),
    [
        (403, "PERMISSION_DENIED", REFUSED_FOR_S, False),
        (404, "NOT_FOUND", REFUSED_FOR_S, False),
        (401, "UNAUTHENTICATED", REFUSED_FOR_S, False),
        (429, "RESOURCE_EXHAUSTED", FAILED_FOR_S, True),
        (503, "UNAVAILABLE", FAILED_FOR_S, True),
    ],
)
def test_refusal_and_failure_hold_for_a_while_and_are_asked_once(
    cache: Cache, google: GoogleServer, status: int, reason: str, holds_s: float, passing: bool
) -> None:
    google.fail("*.access", status, reason, "words of Google", times=1)

    failure = cache.fetch()

    assert isinstance(failure, RuntimeFailure)
    assert may_pass(failure) is passing
    assert len(google.calls("*.access")) == 1, "the worker's loop is what tries again"
    cache.clock.advance(seconds=holds_s - 1)
    assert cache.secrets.find(HF) is failure
    cache.clock.advance(seconds=1)
    assert cache.secrets.find(HF) is None
    assert cache.fetch() == {"HF_TOKEN": CANARY}


def test_withdrawn_grant_ends_what_the_cache_had(cache: Cache, google: GoogleServer) -> None:
    cache.fetch()
    google.deny("*.access", "secretmanager.versions.access")
    cache.clock.advance(seconds=LIFETIME_S)

    assert isinstance(cache.fetch(), NotPossible)
    assert isinstance(cache.secrets.find(HF), NotPossible)


def test_server_that_is_not_there_is_a_passing_failure(google: GoogleServer) -> None:
    cache = Cache(google)
    google.stop()
    google.stop = lambda: None  # type: ignore[method-assign]

    failure = cache.fetch()

    assert isinstance(failure, InfrastructureFailure)
    assert may_pass(failure)
    cache.secrets.close()


@pytest.mark.parametrize("value", [b"\xff" + CANARY.encode(), CANARY.encode() + b"\0", b""])
def test_value_that_no_variable_can_carry_is_refused_without_it(
    cache: Cache, google: GoogleServer, value: bytes
) -> None:
    google.put_secret("hf-token", value)

    failure = cache.fetch()

    assert isinstance(failure, NotPossible)
    assert CANARY not in failure.render()
    assert (failure.__traceback__, failure.__cause__, failure.__context__) == (None, None, None)


def test_error_that_nobody_foresaw_is_told_by_its_kind_alone(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(value: bytes) -> int:
        raise ValueError(value)

    monkeypatch.setattr("runtime.stack.secrets.crc32c", explode)

    failure = cache.fetch()

    assert isinstance(failure, InfrastructureFailure)
    assert failure.render() == "error: cannot read the secrets `hf-token`: ValueError\nhint: try again"


def test_newest_enabled_version_is_read_if_the_last_one_is_disabled(cache: Cache, google: GoogleServer) -> None:
    google._add_version("projects/p/secrets/hf-token", b"newer")
    google.versions["projects/p/secrets/hf-token"][-1]["state"] = "DISABLED"

    assert cache.fetch() == {"HF_TOKEN": CANARY}


def test_contract_is_read_again_for_a_name_that_it_did_not_have_and_for_no_other(google: GoogleServer) -> None:
    cache = Cache(google, replace(STACK, secrets={"hf-token": SECRETS["hf-token"]}))
    reads = []
    cache.secrets._find_outputs = lambda: reads.append(1) or cache.now  # type: ignore[func-returns-value]

    assert cache.fetch() == {"HF_TOKEN": CANARY}
    assert reads == []
    assert isinstance(cache.fetch(("wandb",)), NotGranted)
    assert isinstance(cache.fetch(("no-such",)), NotGranted)
    assert reads == [1], "each unknown name made the worker read the contract again"
    cache.now = STACK
    cache.clock.advance(seconds=REFUSED_FOR_S)
    assert cache.fetch(("wandb",)) == {"WANDB_API_KEY": "w-1"}
    cache.secrets.close()


def test_contract_that_cannot_be_read_again_is_no_fault_of_the_task(google: GoogleServer) -> None:
    cache = Cache(google)

    def fail() -> StackOutputs:
        raise RequestRefused("no stack named `dev`")

    cache.secrets._find_outputs = fail

    failure = cache.fetch(("other",))

    assert isinstance(failure, RequestRefused)
    assert not isinstance(failure, NotGranted)
    cache.secrets.close()


def test_cache_that_is_closed_does_not_wait_for_a_call_that_hangs(google: GoogleServer) -> None:
    gate, asked = threading.Event(), threading.Event()
    others = set(threading.enumerate())
    cache = Cache(google)

    def hang() -> StackOutputs:
        asked.set()
        gate.wait()
        return STACK

    cache.secrets._find_outputs = hang
    cache.secrets.fetch(("other",), lambda found: pytest.fail("the worker has left"))
    assert asked.wait(60)
    before = {each for each in threading.enumerate() if each.name.startswith("runtime-io")} - others

    cache.secrets.close()

    assert any(thread.is_alive() for thread in before)
    gate.set()
    for thread in before:
        thread.join(60)
        assert not thread.is_alive()


# which


def test_choice_is_the_default_of_the_stack_or_the_names_of_the_task() -> None:
    granted = find_granted(STACK)

    assert list(granted) == ["hf-token", "wandb"]
    assert [choose(named, granted) for named in (None, (), ("wandb",), ("wandb", "hf-token", "wandb"))] == [
        ("hf-token",),
        (),
        ("wandb",),
        ("hf-token", "wandb"),
    ]


def test_word_of_a_later_release_is_given_by_name_only() -> None:
    granted = find_granted(replace(STACK, secrets={"a": replace(SECRETS["wandb"], attempts="sometimes")}))

    assert (choose(None, granted), choose(("a",), granted)) == ((), ("a",))


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("hf-tokn", "UnknownName", "did you mean `hf-token`?"),
        ("deploy", "NotPossible", "add `worker` to `readers` of `secrets.deploy` in Pulumi.dev.yaml"),
        ("hf_AAAABBBB", "RequestRefused", "never values"),
    ],
)
def test_name_that_attempts_cannot_get_is_refused_with_the_next_step(name: str, kind: str, says: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        check_named([name], STACK)

    assert type(refused.value).__name__ == kind
    assert says in (refused.value.hint or "")
    assert (name in refused.value.render()) is (kind != "RequestRefused")


def test_two_secrets_in_one_variable_are_refused() -> None:
    both = replace(STACK, secrets={**SECRETS, "other": replace(SECRETS["wandb"], env="HF_TOKEN")})

    check_named(["other"], both)
    with pytest.raises(InvalidContract, match="the same variable"):
        check_named(["hf-token", "other"], both)


@pytest.mark.parametrize(
    "variable",
    [
        *("PATH", "HOME", "LD_PRELOAD", "LD_AUDIT", "DYLD_INSERT_LIBRARIES", "PYTHONPATH", "PYTHONSTARTUP", "BASH_ENV"),
        *("RUNTIME_OUTPUT_DIR", "RUNTIME_FENCED", "GOOGLE_APPLICATION_CREDENTIALS", "CUDA_VISIBLE_DEVICES", "RANK"),
        *("PUBSUB_EMULATOR_HOST", "STORAGE_EMULATOR_HOST", "GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"),
        *("NO_GCE_CHECK", "GOOGLE_CLOUD_UNIVERSE_DOMAIN", "BOTO_CONFIG", "OPENSSL_CONF", "TPU_LIBRARY_PATH"),
        *("PJRT_NAMES_AND_LIBRARY_PATHS", "CUDA_INJECTION64_PATH", "NCCL_NET_PLUGIN", "OMP_TOOL_LIBRARIES"),
        *("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "npm_config_registry", "NPM_CONFIG_REGISTRY"),
        *("BASH_FUNC_ls", "A=B", "A B", "", "1A", "A\n", "\u00c4"),
    ],
)
def test_variable_of_the_system_or_the_runtime_carries_no_secret(variable: str) -> None:
    assert not is_free_variable(variable)


@pytest.mark.parametrize(
    "variable",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "_x", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY_PASSWORD", "UV_INDEX_LAB_PASSWORD"),
        *("NCCL_DEBUG", "OMP_NUM_THREADS", "GOOGLE_CLOUD_PROJECT", "TPU_NAME", "CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_variable_of_an_application_carries_a_secret(variable: str) -> None:
    assert is_free_variable(variable)
