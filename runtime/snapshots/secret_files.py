"""Signs by which a file, or the text of one, is taken for a secret, which does not belong in a snapshot."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from typing import Final

from runtime.secret_detection import FORMS, is_secret

_FILES: Final = (
    # Variables: https://github.com/motdotla/dotenv#readme
    *(".env", ".env.keys"),
    # Private keys of ssh-keygen(1), PKCS #12, PuTTY, Java and KeePass.
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"),
    *(".key", ".p12", ".pfx", ".ppk", ".jks", ".kdbx"),
    # Logins of common programs. wandb keeps its key in .netrc: https://docs.wandb.ai/models/ref/cli/wandb-login
    *(".netrc", "_netrc", ".pypirc", ".git-credentials", "git/credentials", ".pgpass", ".my.cnf", ".mylogin.cnf"),
    *(".htpasswd", ".vault-token", ".dockercfg", ".dockerconfigjson", "gh/hosts.yml", ".streamlit/secrets.toml"),
    *(".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials"),
    # Clouds and clusters. `credentials.json` is also the end of Google's application default and the name of Pulumi's.
    *("credentials.json", "gcloud/credentials.db", "gcloud/access_tokens.db", ".azure/msal_token_cache.json"),
    *(".aws/credentials", ".kube/config", "kubeconfig", "kubeconfig.yml", "kubeconfig.yaml"),
    *(".boto", ".s3cfg", "rclone.conf", ".databrickscfg"),
    # https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables#hftokenpath
    *("huggingface/token", "huggingface/stored_tokens", "kaggle.json"),
    # https://developer.hashicorp.com/terraform/language/manage-sensitive-data
    *(".tfstate", ".tfstate.backup", "credentials.tfrc.json"),
)
"""Ends of names, in lower case, that are signs by themselves."""
_TEMPLATES: Final = "example|sample|template|tmpl|dist|defaults?|schema|vault|enc|encrypted|gpg|age|sops"
"""Words in the name of a `.env` to fill in, or of one that is encrypted."""
_OPEN_OF_SSH: Final = ("config", "known_hosts", "authorized_keys")

_PRIVATE_KEY: Final = "-----BEGIN [A-Z ]{0,30}PRIVATE KEY"
_CONTENTS: Final = {
    # A certificate is a .pem file as well.
    ".pem": _PRIVATE_KEY,
    # A reference to a variable is not a secret: https://docs.npmjs.com/cli/configuring-npm/npmrc
    ".npmrc": r"(?m)^[^#;\n]*_(?:auth|authToken|password)\s*=\s*(?!\$\{)\S",
    ".envrc": "",
    ".docker/config.json": r'"(?:auth|identitytoken|registrytoken)"\s*:\s*"[^"]',
    ".aws/config": r"(?m)^\s*aws_(?:secret_access_key|session_token)\s*=",
    "pip.conf": r"://[^/\s:@]+:(?!\$\{)[^/\s@]+@",
    # Keys of Google's service accounts and clients, if the name suggests one.
    ".json": _PRIVATE_KEY + r'|"(?:refresh_token|client_secret)"\s*:\s*"[^"\s]{16}',
}
"""By the end of a name that most projects use for files without secrets: the pattern that a secret in it matches. If empty,
it is `holds_secret`."""
_GOOGLE_NAME: Final = (
    # The names that Google's console and the examples of its clients use; the console's end in the key's id.
    r"service|account|secret|gcp|google|gcloud|firebase|auth|(?:^|[-_.])(?:sa|keys?|tokens?)\.json$|-[0-9a-f]{12}\.json$"
)
_MOST_READ: Final = 1024 * 1024

_TAIL: Final = 3
_BY_TAIL: Final = {
    tail: tuple(end for end in (*_FILES, *_CONTENTS) if end.endswith(tail))
    for tail in {end[-_TAIL:] for end in (*_FILES, *_CONTENTS)}
}
"""Most names of a large tree are dismissed by their last letters."""
_JSON: Final = tuple(end for end in (*_FILES, *_CONTENTS) if end.endswith(".json") and end != ".json")


def find_secret_files(folder: str, files: Iterable[tuple[str, os.stat_result]]) -> list[str]:
    """Return the names of files that look like secrets; `files` have names relative to `folder`, with `/`.

    Names decide. Only if a name leaves it open, which few do, the file is read.
    """
    found = []
    for name, status in files:
        low = name.lower()
        if low.endswith(_BY_TAIL.get(low[-_TAIL:], ())) or ".env." in low or ".ssh/" in low:
            sign = _find_sign(low)
            if sign is True or (
                sign is not False and stat.S_ISREG(status.st_mode) and _matches(_read(f"{folder}/{name}"), sign)
            ):
                found.append(name)
    return found


def _find_sign(low: str) -> str | bool:
    """Return the pattern to look for in a file; True for a name that is sign enough, False for one that is none."""
    folder, _, base = low.rpartition("/")
    if low.endswith(".json") and not low.endswith(_JSON):
        return _CONTENTS[".json"] if re.search(_GOOGLE_NAME, base) else False
    if low.endswith(_FILES):
        return re.search(rf"(?:^|\.)(?:{_TEMPLATES})\.env$", base) is None
    if f"/{folder}".endswith("/.ssh"):
        return not base.endswith(".pub") and base not in _OPEN_OF_SSH
    if base.startswith(".env."):
        return re.search(rf"\.(?:{_TEMPLATES})$", base) is None
    return next((pattern for end, pattern in _CONTENTS.items() if low.endswith(end)), False)


def _matches(text: str, pattern: str) -> bool:
    return re.search(pattern, text) is not None if pattern else holds_secret(text)


def _read(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""  # Gone, or closed to this user: the snapshot reports that when it reads the file.
    try:
        return os.read(descriptor, _MOST_READ).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


# text

_IN_TEXT: Final = _PRIVATE_KEY + r"[\s\S]{0,9999}" + "|" + FORMS
_ASSIGNED: Final = (
    # Every repetition has a limit, so that no text takes more than its length.
    r"""(?m)(?<![\w.-])([A-Za-z_][\w.-]{0,99})["']?\]?\s{0,9}[:=]\s{0,9}\(?\s{0,9}["']([^"'\n]{1,999})["']"""
    r"""|^[ \t]{0,99}(?:export[ \t]{1,9})?([A-Za-z_][\w.-]{0,99})(?:=|:[ \t]{1,9})([^\s"'(]{1,999})$"""
)
"""A name and a literal in quotes, in most languages; a line `NAME=value` or `name: value`."""
_TYPES: Final = ("str", "bytes", "int", "float", "bool", "Any", "object")


def holds_secret(text: str) -> bool:
    """Whether a text holds a private key, a well-known form of a token, or a name that is given a secret literal."""
    return bool(find_secrets(text))


def find_secrets(text: str) -> set[str]:
    """Return the private keys, tokens of a well-known form, and literals for names of secrets in a text."""
    found = {each.group() for each in re.finditer(_IN_TEXT, text)}
    for quoted_name, quoted, name, value in re.findall(_ASSIGNED, text):
        if value not in _TYPES and is_secret(quoted_name or name, quoted or value):
            found.add(quoted or value)
    return found
