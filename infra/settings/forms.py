"""What a single setting may be, declared beside it in `model`: ranges of numbers, forms of texts, choices.

`find_declared_problems` judges a settings value by these declarations; a list never names anything twice.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from infra.settings.problems import find_repeated, wrong
from runtime.outputs import PROJECT_ID
from runtime.schema import Problem, join, suggest, without_none

_PATH: Final = r"projects/(?P<project>[a-z0-9.:-]+)"
LINK: Final = rf"(?:https://www\.googleapis\.com/compute/v1/)?{_PATH}"
SUBNET: Final = re.compile(rf"{LINK}/regions/(?P<region>[a-z0-9-]+)/subnetworks/[a-z0-9-]+")
NETWORK: Final = re.compile(rf"{LINK}/global/networks/[a-z0-9-]+")
_REPOSITORY_NAME: Final = r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
REPOSITORY: Final = re.compile(rf"{_PATH}/locations/(?P<region>[a-z0-9-]+)/repositories/(?P<name>{_REPOSITORY_NAME})")
KEY: Final = re.compile(
    rf"{_PATH}/locations/(?P<location>[a-z0-9-]+)"
    r"/keyRings/(?P<ring>[A-Za-z0-9_-]{1,63})/cryptoKeys/(?P<key>[A-Za-z0-9_-]{1,63})"
)
DNS_NAME: Final = re.compile(r"(?=.{1,253}$)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
LARGEST: Final = 2**53 - 1
"""The engine carries every number as a double, and larger whole numbers change on the way."""
# https://github.com/distribution/reference has the grammar.
IMAGE_HOST: Final = r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?(?::[0-9]{1,5})?"
IMAGE_PATH: Final = r"(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)"
ACCESS_MODES: Final = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
MAX_NODES: Final = 1024


class Declared(Protocol):
    def problems(self, value: Any, path: str) -> Iterator[Problem]: ...


@dataclass(frozen=True, slots=True)
class Between:
    """A whole number; both ends are allowed."""

    least: int
    most: int
    or_zero: bool = False

    def problems(self, value: int, path: str) -> Iterator[Problem]:
        if not (self.least <= value <= self.most or (self.or_zero and value == 0)):
            zero = "0, or " if self.or_zero else ""
            yield Problem(path, f"is {value:,}, allowed are {zero}{self.least:,} to {self.most:,}")


@dataclass(frozen=True, slots=True)
class Form:
    pattern: re.Pattern[str]
    allowed: str
    """Continues `allowed is`."""
    hint: str | None = None

    def problems(self, value: str, path: str) -> Iterator[Problem]:
        if not self.pattern.fullmatch(value):
            yield wrong(path, value, self.allowed, self.hint)


@dataclass(frozen=True, slots=True)
class Choice:
    among: Sequence[str]

    def problems(self, value: str, path: str) -> Iterator[Problem]:
        if value not in self.among:
            yield wrong(path, value, f"one of {', '.join(self.among)}", suggest(value, self.among))


PRIVATE: Final = tuple(
    ipaddress.ip_network(each) for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
)


Range: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_range(text: str) -> Range | None:
    """Read a range that ends in `/20`. Python also reads `/255.255.240.0`, `/020` and no length, Google and Kubernetes do not."""
    try:
        return ipaddress.ip_network(text) if re.fullmatch(r"[^/]+/(?:0|[1-9][0-9]{0,2})", text) else None
    except ValueError:
        return None


def is_within(inner: Range, outer: Sequence[Range]) -> bool:
    return any(inner.version == each.version and inner.subnet_of(each) for each in outer)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Cidr:
    private: bool

    def problems(self, value: str, path: str) -> Iterator[Problem]:
        parsed = parse_range(value)
        if parsed is None:
            yield wrong(path, value, "a range with the length of its prefix and no host bits, such as `10.64.0.0/20`")
        elif self.private and not is_within(parsed, PRIVATE):
            yield wrong(path, value, f"a private IPv4 range, within {', '.join(map(str, PRIVATE))}")


def _form(pattern: str, allowed: str, hint: str | None = None) -> Form:
    return Form(re.compile(pattern), allowed, hint)


ACCOUNT: Final = _form(
    r"[a-z][a-z0-9-]{4,28}[a-z0-9]@[a-z0-9.-]+\.iam\.gserviceaccount\.com",
    "a service account, `NAME@PROJECT.iam.gserviceaccount.com`",
)
AUDIENCE: Final = _form("[A-Za-z0-9._:/-]{1,256}", "letters, digits and `-._:/`, 256 at most")
BILLING_ACCOUNT: Final = _form("[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}", "`XXXXXX-XXXXXX-XXXXXX` in hex digits")
_LETTERS: Final = "lower case letters, digits, dashes, underscores"
BUCKET: Final = _form(
    r"(?!goog|.*google)[a-z0-9][a-z0-9_-]{1,61}[a-z0-9]", f"3 to 63 {_LETTERS}, not Google's name, without `gs://`"
)
OTHERS_BUCKET: Final = _form(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", f"3 to 63 {_LETTERS}, dots, without `gs://`")
CHANNEL: Final = _form(
    rf"{_PATH}/notificationChannels/[0-9]{{1,20}}",
    "`projects/P/notificationChannels/ID`",
    "`gcloud beta monitoring channels list` prints the names",
)
CURRENCY: Final = _form("[A-Z]{3}", "three capital letters, such as `USD`")
ENVIRONMENT: Final = _form("[A-Za-z0-9][A-Za-z0-9 ./_-]{0,254}", "the name of a protected environment")
IMAGE_SOURCE: Final = _form(rf"{IMAGE_HOST}{IMAGE_PATH}+", "`HOST/PATH`, such as `ghcr.io/lab`")
ISSUER: Final = _form(
    r"https://[A-Za-z0-9.-]+(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?",
    "`https://HOST/PATH`, the `iss` of the tokens, without a query",
)
KUBERNETES_NAME: Final = Form(DNS_NAME, "lower case letters, digits, dashes and dots")
LAUNCHER: Final = _form(
    r"(?:User|Group):(?!system:)\S+|ServiceAccount:[a-z0-9-]+/[a-z0-9.-]+",
    "`User:NAME`, `Group:NAME` or `ServiceAccount:NAMESPACE/NAME`, and no name of Kubernetes' own, `system:`",
)
NETWORK_LINK: Final = Form(NETWORK, "a self-link, `projects/P/global/networks/N`")
PULL_SECRET: Final = Form(DNS_NAME, "the name of a secret in the namespace")
PROJECT: Final = Form(PROJECT_ID, "a project's id")
REPOSITORY_NAME: Final = _form(_REPOSITORY_NAME, "lower case letters, digits and dashes, 63 at most")
SECRET: Final = _form(rf"{_PATH}/secrets/[A-Za-z0-9_-]{{1,255}}", "`projects/P/secrets/N`, without a version")
SERVER: Final = _form(r"https://[A-Za-z0-9.\[\]:-]+(?:/[!-~]*)?", "an address that begins with `https://`")
SHM_SIZE: Final = _form(r"[1-9][0-9]{0,5}[mg]", "a size such as `8g` or `512m`")
STATE_KEY: Final = Form(KEY, "a key, `projects/P/locations/L/keyRings/R/cryptoKeys/K`")
STORAGE_CLASS: Final = _form(rf"(?:{DNS_NAME.pattern})?", "lower case letters, digits, dashes and dots")
SUBJECT: Final = _form(
    r"[A-Za-z0-9._:/@|+=,-]{1,127}",
    "the `sub` of a token, 127 letters, digits and `-._:/@|+=,` at most; no pattern",
)
SUBNET_LINK: Final = Form(SUBNET, "a self-link, `projects/P/regions/R/subnetworks/N`")
WITHOUT_SPACES: Final = _form(r"(?:[!-~]|\w){1,253}", "a name without spaces and control characters, 253 at most")
WORKLOAD_POOL: Final = _form(rf"(?:{PROJECT_ID.pattern})\.svc\.id\.goog", "`PROJECT.svc.id.goog`")


def find_declared_problems(value: object, path: str) -> Iterator[Problem]:
    """Judge the fields of `value` alone, without nested settings."""
    kind: Any = type(value)
    for name, declared, of_items in _declarations(kind):
        given, where = getattr(value, name), join(path, name)
        for rule in declared if given is not None else ():
            yield from rule.problems(given, where)
        for index, item in enumerate(given or ()) if of_items else ():
            for rule in of_items:
                yield from rule.problems(item, f"{where}[{index}]")
        if isinstance(given, tuple):
            yield from find_repeated(given, where)


@functools.cache
def _declarations(kind: type) -> list[tuple[str, Sequence[Declared], Sequence[Declared]]]:
    """Field → what it declares, and what each item of it does."""
    found = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        is_annotated = typing.get_origin(hint) is typing.Annotated
        declared, bare = (
            hint.__metadata__ if is_annotated else (),
            without_none(hint.__origin__ if is_annotated else hint),
        )
        items = typing.get_args(bare)[:1] if typing.get_origin(bare) is tuple else ()
        found.append((name, declared, getattr(items[0], "__metadata__", ()) if items else ()))
    return found
