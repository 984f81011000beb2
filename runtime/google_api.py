"""Google's JSON APIs over HTTPS, for the few calls that need no client library of their own.

One method per verb; answers are plain JSON objects. Credentials are the machine's (application default credentials).
`RUNTIME_GOOGLE_API` names a server that stands in for all of Google, as `PUBSUB_EMULATOR_HOST` does for Pub/Sub: then
nothing is authenticated, and the host becomes the first part of the path.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from runtime.errors import InfrastructureFailure, MissingExtra

SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)
PATIENCE_S: Final = 30
_AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})
_PAUSES_S: Final = (0.2, 1.0, 3.0)


class GoogleRefused(InfrastructureFailure):
    """Google answered with an error. `status` is the HTTP code, `reason` Google's word for it (`PERMISSION_DENIED`)."""

    def __init__(self, method: str, url: str, status: int, reason: str, message: str, hint: str | None = None) -> None:
        self.status, self.reason, self.url = status, reason, url
        super().__init__(
            f"google refused `{method} {url.partition('?')[0]}`: {message or reason}",
            facts=[f"answered {status} {reason}".rstrip()],
            hint=hint or _hint(status, message),
            retryable=status in _AGAIN,
        )


class GoogleUnreachable(InfrastructureFailure):
    """No answer, or no credentials to ask with."""


class GoogleApi:
    """Calls `https://SERVICE.googleapis.com/PATH`. Reads are repeated on passing errors, writes never are."""

    def __init__(self, *, server: str | None = None, impersonate: str | None = None) -> None:
        """`server` stands in for Google; `impersonate` is a service account to act as. Raises `MissingExtra`."""
        self._server = server.rstrip("/") if server else None
        self._session = _open_session(anonymous=server is not None, impersonate=impersonate)

    def get(self, service: str, path: str, **query: Any) -> dict[str, Any]:
        return self._call("GET", service, path, query=query)

    def find(self, service: str, path: str, **query: Any) -> dict[str, Any] | None:
        """As `get`; None where there is no such thing."""
        try:
            return self.get(service, path, **query)
        except GoogleRefused as problem:
            if problem.status == 404:
                return None
            raise

    def pages(self, service: str, path: str, items: str, **query: Any) -> Iterator[dict[str, Any]]:
        """All members of the list `items` of every page."""
        token = ""
        while True:
            answer = self.get(service, path, **query, **({"pageToken": token} if token else {}))
            yield from answer.get(items, ())
            token = answer.get("nextPageToken", "")
            if not token:
                return

    def post(self, service: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        return self._call("POST", service, path, query=query, body=body or {})

    def ask(self, service: str, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> dict[str, Any]:
        """A POST that only reads, such as `testIamPermissions`; repeated like a read."""
        return self._call("POST", service, path, query=query, body=body or {}, repeat=True)

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
        for pause in (*_PAUSES_S, None):
            try:
                answer = self._session.request(method, url, params=dict(query), json=body, timeout=PATIENCE_S)
            except Exception as problem:
                failure: InfrastructureFailure = _explain(method, url, problem)
            else:
                if answer.ok:
                    value: dict[str, Any] = answer.json() if answer.content else {}
                    return value
                failure = _refusal(method, url, answer)
            if pause is None or not again or not failure.retryable:
                raise failure
            time.sleep(pause)
        raise AssertionError("unreachable")


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
    try:
        credentials, _ = google.auth.default(scopes=SCOPES)
    except GoogleAuthError as problem:
        raise GoogleUnreachable(
            f"no Google credentials on this machine: {problem}", hint="gcloud auth application-default login"
        ) from problem
    if impersonate:
        credentials = impersonated_credentials.Credentials(  # type: ignore[no-untyped-call]
            source_credentials=credentials, target_principal=impersonate, target_scopes=SCOPES
        )
    return AuthorizedSession(credentials)  # type: ignore[no-untyped-call]


def _explain(method: str, url: str, problem: Exception) -> InfrastructureFailure:
    import requests
    from google.auth.exceptions import GoogleAuthError

    if isinstance(problem, GoogleAuthError):
        return GoogleUnreachable(
            f"google refused the credentials of this machine: {problem}",
            hint="gcloud auth application-default login",
            retryable=problem.retryable,
        )
    if isinstance(problem, requests.RequestException):
        return GoogleUnreachable(
            f"no answer to `{method} {url}`: {problem}", hint="check the network, then try again", retryable=True
        )
    raise problem


def _refusal(method: str, url: str, answer: Any) -> GoogleRefused:
    try:
        error = answer.json().get("error", {})
    except ValueError:
        error = {}
    error = error if isinstance(error, Mapping) else {"message": str(error)}
    return GoogleRefused(
        method, url, answer.status_code, str(error.get("status", answer.reason or "")), str(error.get("message", ""))
    )


def _hint(status: int, message: str) -> str:
    if "has not been used" in message or "is disabled" in message:
        return "the API is not enabled: run `pulumi up` for this stack, or `gcloud services enable`"
    return {
        401: "gcloud auth application-default login",
        403: "`runtime doctor` says what this identity may do",
        404: "`runtime stack show` says what the stack has",
        429: "a quota is spent: wait, then try again",
    }.get(status, "try again; https://status.cloud.google.com says whether a service is down")
