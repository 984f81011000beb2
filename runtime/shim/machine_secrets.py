"""Values of secrets that this machine reads from Google's Secret Manager with its own identity.

A value goes into the variables of the command and nowhere else: no file, message or error has one.
https://cloud.google.com/secret-manager/docs/reference/rest/v1/projects.secrets.versions/access
"""

import base64
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request

from runtime.shim.cloud import MAY_PASS, NEAR, BucketDenied, ask_account
from runtime.shim.common import SetupFailed

SECRETS_S = 30.0
"""How long answers that may pass are waited out."""
SECRETS_PAUSE_S = 1.0
ANSWER_S = 10.0
OLDER = 20
"""Number of versions below a disabled one that are tried."""
HOST = "secretmanager.googleapis.com"
_ABOUT = 300
"""Letters of Google's own words in a message."""


class SecretRefusal(Exception):
    """Secret Manager refused: `status` is the HTTP code, the text Google's message."""

    def __init__(self, status, message):
        Exception.__init__(self, message)
        self.status = status


def read_secrets(named):
    """Variable → value, of a mapping of variables to `projects/P/secrets/N`: the newest enabled version of each.

    Raises `SetupFailed`, with the secret and this machine's account in the text.
    """
    until = time.monotonic() + SECRETS_S
    found = {}
    for name, resource in sorted(named.items()):
        while True:
            try:
                found[name] = _read_newest(name, resource)
                break
            except (IOError, http.client.HTTPException, ValueError, KeyError, BucketDenied, SecretRefusal) as problem:
                broken = isinstance(problem, (IOError, http.client.HTTPException))
                passes = problem.status in MAY_PASS if isinstance(problem, SecretRefusal) else broken
                if not passes or time.monotonic() >= until:
                    raise SetupFailed(_explain(name, resource, problem))
            time.sleep(SECRETS_PAUSE_S)
    return found


def _read_newest(name, resource):
    token = json.loads(ask_account("token").decode("utf-8"))["access_token"]
    try:
        value = _access(resource, "latest", token)
    except SecretRefusal as refused:
        # `latest` is the newest version, enabled or not, and listing takes a right that reading does not.
        newest = re.search(r"/versions/(\d+)\]", str(refused)) if refused.status == 400 else None
        if newest is None:
            raise
        value = _read_older(resource, int(newest.group(1)), token)
    text = value.decode("utf-8", "surrogateescape")
    if value != text.encode("utf-8", "replace") or "\0" in text:
        # A decoder's own error would have the value.
        raise SetupFailed("%s is no text that a variable can carry" % _name(name, resource))
    return text


def _read_older(resource, newest, token):
    for number in range(newest - 1, max(0, newest - 1 - OLDER), -1):
        try:
            return _access(resource, str(number), token)
        except SecretRefusal as refused:
            if refused.status not in (400, 404):
                raise
    raise SecretRefusal(404, "it has no enabled version")


def _access(resource, version, token):
    stand_in = os.environ.get("RUNTIME_GOOGLE_API")
    server = stand_in.rstrip("/") + "/" if stand_in else "https://"
    request = urllib.request.Request("%s%s/v1/%s/versions/%s:access" % (server, HOST, resource, version))
    request.add_header("Authorization", "Bearer " + token)
    opener = NEAR.open if request.type == "http" else urllib.request.urlopen
    try:
        with opener(request, timeout=ANSWER_S) as answer:
            return base64.b64decode(json.loads(answer.read().decode("utf-8"))["payload"].get("data", ""))
    except urllib.error.HTTPError as refused:
        with refused:
            said = refused.read().decode("utf-8", "replace")
        raise SecretRefusal(refused.code, _find_message(said))


def _find_message(said):
    try:
        return " ".join(json.loads(said)["error"]["message"].split()).rstrip(".")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


def _explain(name, resource, problem):
    """The sentence about a secret that cannot be read; `problem` never has a value."""
    what = "cannot read " + _name(name, resource)
    if not isinstance(problem, SecretRefusal):
        return "%s: %s" % (what, getattr(problem, "reason", None) or getattr(problem, "strerror", None) or problem)
    said = " (HTTP %d: %s)" % (problem.status, str(problem)[:_ABOUT])
    if problem.status in (401, 403):
        return "%s: %s may not, it needs roles/secretmanager.secretAccessor there%s" % (what, _find_account(), said)
    if problem.status == 404:
        return "%s as %s: it does not exist, or has no enabled version%s" % (what, _find_account(), said)
    return "%s as %s%s" % (what, _find_account(), said)


def _name(name, resource):
    return "secret `%s` from %s" % (name, resource)


def _find_account():
    """The e-mail address of this machine's service account."""
    try:
        return ask_account("email").decode("utf-8").strip()
    except (IOError, OSError, ValueError, BucketDenied):
        return "the account of this machine"
