"""Google's JSON APIs over HTTPS, for the few calls that need no client library of their own.

One method per verb; answers are plain JSON objects. Credentials are the machine's (application default credentials).
`RUNTIME_GOOGLE_API` names a server that stands in for all of Google, as `PUBSUB_EMULATOR_HOST` does for Pub/Sub: requests
to it are not authenticated, and Google's host becomes the first part of their path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

from runtime.errors import InfrastructureFailure, MissingExtra
from runtime.records.blobs.bucket import has_machine_credentials
from runtime.system import system

SCOPES: Final = (
    "https://www.googleapis.com/auth/cloud-platform",
    "https://www.googleapis.com/auth/userinfo.email",
)
PATIENCE_S: Final = 30
CONNECT_S: Final = 5
_AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})
_PAUSES_S: Final = (0.2, 1.0, 3.0)
_PARTIAL: Final = ("UNREACHABLE", "PARTIAL_SUCCESS")
"""Codes of warnings in lists of Compute Engine that lack members."""


class GoogleRefused(InfrastructureFailure):
    """Google answered with an error. `status` is the HTTP code, `reason` Google's own code (`PERMISSION_DENIED`),
    `said` its words."""

    def __init__(self, method: str, url: str, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.url = status, reason, url
        self.said = " ".join(message.split()).rstrip(".")
        super().__init__(
            f"google refused `{method} {url.partition('?')[0]}`: {self.said or reason}",
            facts=[f"answered {status} {reason}".rstrip()],
            hint=_hint(status, message),
            retryable=status in _AGAIN,
        )

    @property
    def disabled_api(self) -> bool:
        """Whether the API is not enabled in the project; then nothing is known about the resource."""
        return self.status == 403 and _is_disabled(self.message)


class GoogleUnreachable(InfrastructureFailure):
    """Google did not answer, or this machine has no credentials."""


class GoogleApi:
    """Calls `https://SERVICE.googleapis.com/PATH`. Repeats reads on passing errors, never writes."""

    def __init__(self, *, server: str | None = None, impersonate: str | None = None, again: bool = True) -> None:
        """`server` stands in for Google; `impersonate` is a service account to act as; without `again`, failed reads
        are not repeated. Raises `MissingExtra`, and `GoogleUnreachable` without credentials."""
        self.stands_in = server is not None
        self._server = server.rstrip("/") if server else None
        self._pauses: tuple[float, ...] = _PAUSES_S if again else ()
        self._impersonate = impersonate
        self._session = _open_session(anonymous=self.stands_in, impersonate=impersonate)
        self.skew: timedelta | None = None
        """Time by which this machine's clock was ahead of Google's in the last answer."""

    def who(self) -> str | None:
        """Return the e-mail address of this identity; None if the credentials do not show it."""
        if self._impersonate:
            return self._impersonate
        credentials = getattr(self._session, "credentials", None)
        known = getattr(credentials, "service_account_email", None)
        if known and known != "default":
            return str(known)
        email = self.get("www", "oauth2/v2/userinfo").get("email")
        return str(email) if email else None

    def close(self) -> None:
        self._session.close()

    def __enter__(self) -> GoogleApi:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def get(self, service: str, path: str, **query: Any) -> dict[str, Any]:
        return self._call("GET", service, path, query=query)

    def find(self, service: str, path: str, **query: Any) -> dict[str, Any] | None:
        """Like `get`, but returns None for a missing resource. An API that is not enabled raises."""
        try:
            return self.get(service, path, **query)
        except GoogleRefused as problem:
            if problem.status == 404:
                return None
            raise

    def pages(self, service: str, path: str, items: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield all members of the list `items` of every page. Raises `GoogleUnreachable` for a list that may be incomplete."""
        token, seen = "", set[str]()
        while True:
            answer = self.get(service, path, **query, **({"pageToken": token} if token else {}))
            if problem := find_list_problem(answer, items):
                raise GoogleUnreachable(
                    f"no whole list of Google's from `GET {service}.googleapis.com/{path.lstrip('/')}`: {problem}",
                    hint="try again; https://status.cloud.google.com says whether a service is down",
                    retryable=True,
                )
            yield from answer.get(items, ())
            token = answer.get("nextPageToken", "")
            if not token:
                return
            if token in seen:
                raise GoogleUnreachable(
                    f"no whole list of Google's from `GET {service}.googleapis.com/{path.lstrip('/')}`: its pages repeat",
                    retryable=True,
                )
            seen.add(token)

    def allowed(self, service: str, path: str, permissions: tuple[str, ...]) -> frozenset[str]:
        """Return those of `permissions` that this identity has on the resource at `path`, by its `testIamPermissions`.

        For some missing resources Google returns an empty list.
        """
        if service == "storage":
            answer = self.get("storage", f"{path}/iam/testPermissions", permissions=list(permissions))
        else:
            body = {"permissions": list(permissions)}
            # A POST that only reads, so it is repeated like a read.
            answer = self._call("POST", service, f"{path}:testIamPermissions", query={}, body=body, repeat=True)
        return frozenset(answer.get("permissions", ()))

    def post(self, service: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        return self._call("POST", service, path, query=query, body=body or {})

    def delete(self, service: str, path: str, **query: Any) -> dict[str, Any]:
        return self._call("DELETE", service, path, query=query)

    def _call(
        self,
        method: str,
        service: str,
        path: str,
        *,
        query: Mapping[str, Any],
        body: Mapping[str, Any] | None = None,
        repeat: bool | None = None,
    ) -> dict[str, Any]:
        host = f"{service}.googleapis.com"
        root = f"{self._server}/{host}" if self._server else f"https://{host}"
        url = f"{root}/{path.lstrip('/')}"
        again = method == "GET" if repeat is None else repeat
        for pause in (*self._pauses, None):
            try:
                answer = self._session.request(
                    method, url, params=dict(query), json=body, timeout=(CONNECT_S, PATIENCE_S)
                )
            except Exception as problem:
                failure: InfrastructureFailure = _explain(method, url, problem)
                cause: Exception | None = problem
            else:
                self._record_time(answer.headers.get("date"))
                if answer.ok:
                    return _read_object(method, url, answer)
                failure, cause = _refusal(method, url, answer), None
            if pause is None or not again or not failure.retryable:
                raise failure from cause
            system.sleep(pause)
        raise AssertionError("unreachable")

    def _record_time(self, date: str | None) -> None:
        try:
            self.skew = system.now() - parsedate_to_datetime(date) if date else self.skew
        except (ValueError, TypeError):  # no date, or one without a zone
            return


def find_list_problem(answer: Mapping[str, Any], items: str) -> str | None:
    """Return the problem with a page of a list; None if it is complete."""
    members = answer.get(items, [])
    if "error" in answer:
        return f"it is an error: {_one_line(answer['error'])}"
    if not isinstance(members, list) or not all(isinstance(each, Mapping) for each in members):
        return f"`{items}` is no list of objects"
    if missing := answer.get("unreachable"):
        return f"some places could not be reached: {_one_line(missing)}"
    warning = answer.get("warning")
    if isinstance(warning, Mapping) and warning.get("code") in _PARTIAL:
        return f"{warning['code']}: {_one_line(warning.get('message', ''))}"
    return None


def _read_object(method: str, url: str, answer: Any) -> dict[str, Any]:
    if not answer.content:
        return {}
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise GoogleUnreachable(
            f"no answer of Google's to `{method} {url}`: it is no JSON object",
            hint="is there a proxy or a log-in page in between?",
            retryable=False,
        )
    return value


def _open_session(*, anonymous: bool, impersonate: str | None) -> Any:
    try:
        import google.auth
        import requests
        from google.auth import impersonated_credentials
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession
    except ModuleNotFoundError as problem:
        raise MissingExtra("Google Cloud", "gcp") from problem
    if anonymous:
        return requests.Session()
    _expect_credentials()
    try:
        import warnings

        with warnings.catch_warnings():
            # Hides the warning about a laptop's missing quota project: Google's refusal explains it better.
            warnings.simplefilter("ignore")
            credentials, _ = google.auth.default(scopes=SCOPES)
    except GoogleAuthError as problem:
        raise GoogleUnreachable(
            f"no Google credentials on this machine: {_one_line(problem)}",
            hint="gcloud auth application-default login",
            retryable=False,
        ) from problem
    if impersonate:
        credentials = impersonated_credentials.Credentials(  # type: ignore[no-untyped-call]
            source_credentials=credentials, target_principal=impersonate, target_scopes=SCOPES
        )
    return AuthorizedSession(credentials)  # type: ignore[no-untyped-call]


def _expect_credentials() -> None:
    config = os.environ.get("CLOUDSDK_CONFIG") or str(Path.home() / ".config/gcloud")
    files = (Path(config) / name for name in ("application_default_credentials.json", "active_config"))
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or any(file.exists() for file in files):
        return
    if not has_machine_credentials():
        raise GoogleUnreachable(
            "no Google credentials on this machine",
            facts=["looked in the environment, in gcloud's folder, and for a cloud machine's own"],
            hint="gcloud auth application-default login",
            retryable=False,
        )


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:300]


def _explain(method: str, url: str, problem: Exception) -> InfrastructureFailure:
    import requests
    from google.auth.exceptions import GoogleAuthError

    if isinstance(problem, GoogleAuthError):
        return GoogleUnreachable(
            f"google refused the credentials of this machine: {_one_line(problem)}",
            hint="gcloud auth application-default login",
            retryable=problem.retryable,
        )
    if isinstance(problem, requests.RequestException):
        kind = type(problem).__name__
        return GoogleUnreachable(
            f"no answer to `{method} {url}`: {_REASONS.get(kind, _one_line(problem))}",
            facts=[_one_line(problem)] if kind in _REASONS else [],
            hint="check the network, then try again",
            retryable=True,
        )
    raise problem


_REASONS: Final = {
    "ConnectionError": "the server cannot be reached",
    "ConnectTimeout": f"no connection within {CONNECT_S} s",
    "ReadTimeout": f"nothing came within {PATIENCE_S} s",
    "SSLError": "its certificate is not trusted here",
    "ProxyError": "the proxy cannot be reached",
}


def _refusal(method: str, url: str, answer: Any) -> GoogleRefused:
    try:
        value = answer.json()
    except ValueError:
        value = {}
    error = value.get("error", {}) if isinstance(value, Mapping) else {}
    if not isinstance(error, Mapping):
        error = {"message": str(error)}
    return GoogleRefused(
        method, url, answer.status_code, str(error.get("status", answer.reason or "")), str(error.get("message", ""))
    )


def _is_disabled(message: str) -> bool:
    return "has not been used" in message or "is disabled" in message


def _hint(status: int, message: str) -> str:
    if _is_disabled(message):
        return "the API is not enabled: run `pulumi up` for this stack, or `gcloud services enable`"
    return {
        401: "gcloud auth application-default login",
        403: "`runtime doctor` says what this identity may do",
        404: "`runtime stack show` says what the stack has",
        429: "a quota is spent: wait, then try again",
    }.get(status, "try again; https://status.cloud.google.com says whether a service is down")
