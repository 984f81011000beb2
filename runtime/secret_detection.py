"""Signs by which a variable, a parameter or an argument is taken for a secret that somebody typed in.

What a launch or a submission writes is read by everyone who reads the record store, so both refuse what has such a sign.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

# Patterns are compiled on use: together that takes milliseconds, and many commands need none of them.
_WORDS: Final = (
    r"(?:(?:^|_)([A-Z0-9]+)_|^|_)"
    r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY)(?:_([A-Z0-9]+)|_|$)"
)
_HUMPS: Final = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
_OF_TEXT: Final = (
    "PAD|PADDING|BOS|EOS|UNK|UNKNOWN|CLS|SEP|SEPARATOR|MASK|STOP|START|END|BEGIN|SPECIAL|PREFIX|SUFFIX|MIDDLE|IMAGE|AUDIO|"
    "VIDEO|VISION|SPEECH|TEXT|PATCH|NEXT|LAST|FIRST|PER|MAX|MIN|NUM|N|EXTRA|CLASS|QUERY|REGISTER|POSITION|DECODER|FORCED|"
    "LABEL|THINK|NEWLINE|INITIALIZER|PLACEHOLDER|TRIGGER|INSTANCE|ANSWER|TURN|YES|NO|POSITIVE|NEGATIVE|ROLE|LANG|LANGUAGE|TASK|"
    "MODALITY|OBSERVATION|ACTION|REWARD|VISUAL|SUMMARY|MEMORY|CONTEXT|PREDICTION|BLANK|SILENCE|WORD|PAUSE|"
    "EOT|EOD|EOM|EOH|SINK|GLOBAL|VIRTUAL|SOFT|PROMPT|RESPONSE|LATENT|MODIFIER|SPEAKER|CONTROL|HUMAN|ASSISTANT"
)
"""Words before `token` that make it one of a language model."""
_MEASURES: Final = (
    "FILE|PATH|DIR|NAME|TYPES?|COUNT|LEN|LENGTH|LIMIT|BUDGET|SIZE|DIM|LEVEL|RATE|RATIO|MODE|FORMAT|STRATEGY|WEIGHTS?|LOSS|"
    "EMBED|EMBEDDINGS?|MIXER|MIXING|MERGE|MERGING|POOL|POOLING|DROP|DROPOUT|MASKING|PRUNING|SAMPLING|SELECTION|SHIFT|"
    "CLASSIFICATION|NOISE|PROB|IDS|REDUCTION|AGGREGATION|ENCODING|ENCODER|NORM|INIT|SCHEDULE|SCHEME|METHOD|KIND|STYLE|FN|LAYER|"
    "HEAD|ATTENTION|LOGITS?|OVERLAP|WINDOW|STRIDE|THRESHOLD|BUCKETS?|FILTER|SPLIT|CHUNK|PACKING|REPLACEMENT|INDEX|COLUMN|ORDER|"
    "ENV|VAR|LIST|BIN|DTYPE|SHARDS|CACHE|DATASET|EMB|POS|REDUCER|SCORER|ABSTRACTION|SHARING|SHARER|GENERATION"
)
"""Words after a sign that make the value a place, an amount or a kind, and no secret."""
_PLACE: Final = r"_ID_(?:FILE|PATH|DIR|ENV|VAR)$"
_PLAIN: Final = (
    # Numbers, and words of settings; a reference to a variable; a placeholder, or a special token of a language model.
    r"(?is)[-+]?(?=[\d.]{1,15}(?![\d.]))(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?|true|false|yes|no|on|off|none|null|auto|default|"
    r"[$`].*|[<\[({].*[>\])}]|(?:secret-manager|env|file|kubernetes)://.*|"
)
_SECRET_ANYHOW: Final = ("PASSWORD", "PASSWD")
"""Signs with which a number is a secret as well."""
_PATH: Final = r"(?is)(?:~|\.{0,2})/.*|.*\.(?:json|ya?ml|toml|ini|cfg|txt)"
"""Files of credentials are named by their path, as in `GOOGLE_APPLICATION_CREDENTIALS`."""


@functools.lru_cache(4096)
def find_sign(name: str) -> str | None:
    """Return the word by which a name suggests that its value is a secret; `-`, `.` and capitals divide words."""
    words = re.sub(r"[^A-Za-z0-9]+", "_", re.sub(_HUMPS, "_", name)).upper()
    pattern, start = re.compile(_WORDS), 0
    while found := pattern.search(words, start):
        before, sign, after = found.groups()
        of_text = sign == "TOKEN" and re.fullmatch(_OF_TEXT, before or "")
        if not of_text and not re.fullmatch(_MEASURES, after or "") and not re.search(_PLACE, words):
            return sign
        start = found.end(2)  # The word after it may be a sign as well.
    return None


def looks_secret(name: str) -> bool:
    """Whether the name of a variable or parameter suggests that its value is a secret."""
    return find_sign(name) is not None


def is_secret(name: str, value: object, *, depth: int = 9) -> bool:
    """Whether a name suggests a secret and its value may be one: a number, a flag, a reference or a placeholder is none."""
    sign = find_sign(name)
    if sign is None or value is None or isinstance(value, bool):
        return False
    if isinstance(value, list | tuple):
        return depth > 0 and any(is_secret(name, each, depth=depth - 1) for each in value)
    if isinstance(value, Mapping):
        return False  # Its own names count.
    text = str(value).strip()
    if sign.startswith("CREDENTIAL") and re.fullmatch(_PATH, text):
        return False
    return not re.fullmatch(_PLAIN, text) or (sign in _SECRET_ANYHOW and text[-1:].isdecimal() and text[:1] not in "$`")


def find_secret(values: object, path: str = "", *, depth: int = 20) -> str | None:
    """Return the dotted path of the first name with a secret in nested tables and lists; None if there is none.

    What lies deeper than `depth` is not looked at.
    """
    if isinstance(values, Mapping):
        for name, value in values.items():
            if find_sign(str(name)) and is_secret(str(name), value):
                return f"{path}{name}"
            if (
                type(value) not in _LEAVES
                and depth
                and (found := find_secret(value, f"{path}{name}.", depth=depth - 1))
            ):
                return found
    elif isinstance(values, list | tuple):
        for each in values:
            if type(each) not in _LEAVES and depth and (found := find_secret(each, path, depth=depth - 1)):
                return found
    return None


_LEAVES: Final = frozenset({str, int, float, bool, type(None)})
FORMS: Final = (
    # https://github.com/gitleaks/gitleaks/blob/master/config/gitleaks.toml
    r"\bya29\.[\w-]{20}|\bAIza[\w-]{35}|\bgh[pousr]_\w{30}|\bhf_[A-Za-z0-9]{20}|\bAKIA[0-9A-Z]{16}\b|"
    r"\bsk-(?=[\w-]{0,99}\d)[\w-]{20}"
)
"""Forms of well-known tokens, which are secrets under any name."""
_STEMS: Final = (
    *("token", "secret", "passw", "credential", "key"),
    *("ya29.", "aiza", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "hf_", "akia", "sk-"),
)
_OPTION: Final = r"[A-Za-z_][\w.\[\]-]*"
_LONG_OPTION: Final = r"--|-[A-Za-z][\w-]{3}"
_IN_TABLE: Final = r"""["']?([A-Za-z_][\w.-]{0,99})["']?\s{0,9}:\s{0,9}["']?([^"',{}]{1,999})"""
_PAIR: Final = r"[A-Za-z_][\w.-]*=[^=]"
_SHELLS: Final = ("sh", "bash", "dash", "zsh", "ksh")


def may_hold_secret(words: Sequence[str]) -> bool:
    """Whether a closer look at these arguments is worth its time."""
    text = "\0".join(words).lower()
    return any([stem in text for stem in _STEMS])  # noqa: C419 - a generator takes three times as long


def find_secret_argument(words: Sequence[str]) -> str | None:
    """Return the name of the first argument with a secret: `--name=value`, `--name value`, `NAME=value`, also in `sh -c`.

    An argument without a name that holds a well-known form of a token is named by its number.
    """
    if not may_hold_secret(words):
        return None
    runs_text = False
    for place, word in enumerate(words):
        runs_text = runs_text or (place > 0 and _runs_text(words[place - 1]))
        following = words[place + 1] if place + 1 < len(words) else ""
        name, equals, value = word.partition("=")
        if has_known_form(word):
            is_name = equals and re.fullmatch(_OPTION, name.lstrip("-+~")) and not has_known_form(name)
            return name if is_name else f"argument {place + 1}"
        if runs_text and words[place - 1] == "-c":
            continue  # A program. The turn of a shell has looked at its own.
        if equals:
            # The last part of a URL's query, or of a group as in `model/token=abc`; the rest may be a value.
            name = re.split(r"[/?&;]", name)[-1]
            if value[:1] != "=" and _is_option(name, value):
                return name
            found = find_secret_argument(value.split(",")) if "=" in value else None
            found = found or _find_in_table(value)
        elif re.match(_LONG_OPTION, word):
            # A pair after an option, as in `--secret NAME=SOURCE`, is judged in its own turn.
            if following[:1] != "-" and not re.match(_PAIR, following) and _is_option(word, following):
                return word
            continue
        else:
            found = _find_in_table(word)
            if _runs_text(word) and "python" not in word:
                found = next(
                    filter(None, map(find_secret_in_shell, _find_programs(words[place + 1 : place + 12]))), None
                )
        if found:
            return found
    return None


def drop_secret_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments without those that `find_secret_argument` finds, nor the value after the name of one.

    Only the program is left if they seem to hold a secret all the same, such as in the text of a shell.
    """
    if find_secret_argument(words) is None:
        return list(words)
    kept: list[str] = []
    left = list(words)
    while left:
        pair = left[:2]
        if find_secret_argument(left[:1]):
            del left[:1]
        elif len(pair) > 1 and find_secret_argument(pair) and not find_secret_argument(pair[1:]):
            del left[:2]
        else:
            kept.append(left.pop(0))
    if find_secret_argument(kept):
        return [] if find_secret_argument(kept[:1]) else kept[:1]
    return kept


def has_known_form(text: object) -> bool:
    """Whether a text holds a token of a well-known form, which is a secret under any name."""
    return isinstance(text, str) and re.search(FORMS, text) is not None


def _find_in_table(text: str) -> str | None:
    """Return the name of the first secret in a table of JSON or YAML that is one argument."""
    if not text.startswith("{"):
        return None
    return next((name for name, value in re.findall(_IN_TABLE, text) if is_secret(name, value)), None)


def _find_programs(words: Sequence[str]) -> Iterator[str]:
    """Yield the text that a shell runs, which follows `-c`, `-lc` and the like; options may come before."""
    for place, word in enumerate(words[:-1]):
        if re.fullmatch(r"-[a-z]*c", word):
            yield words[place + 1]
            return


def _runs_text(word: str) -> bool:
    """Whether a program takes the text of another after `-c`."""
    name = word.rpartition("/")[2]
    return name in _SHELLS or name.startswith("python")


def find_secret_in_shell(text: str) -> str | None:
    """Return the name of the first variable or option that a line of shell gives a secret."""
    if not may_hold_secret((text,)):
        return None
    import shlex

    # An operator ends a command; a word of operators alone is the value of nothing.
    split = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="();<>|&\n")
    split.whitespace, split.whitespace_split, split.commenters = " \t\r", True, ""
    try:
        words = [word.strip("();<>|&\n") and word for word in split]
    except ValueError:
        words = text.split()
    return find_secret_argument(words)


def find_secret_anywhere(value: object, *, depth: int = 9) -> str | None:
    """Return the name of the first secret in tables of names, lists of arguments, and lines of shell."""
    if isinstance(value, str):
        return find_secret_in_shell(value)
    found = None
    if isinstance(value, Mapping):
        found = find_secret(value) or next((str(name) for name, each in value.items() if has_known_form(each)), None)
        value = list(value.values())
    if not found and depth and isinstance(value, list | tuple):
        found = find_secret_argument([each for each in value if isinstance(each, str)])
        found = found or next(filter(None, (find_secret_anywhere(each, depth=depth - 1) for each in value)), None)
    return found


ANY_VALUE: Final = "any-value"
"""Stands for a value that may be a secret, to learn whether the place of a parameter matters."""


def _is_option(name: str, value: str) -> bool:
    bare = name.lstrip("-+~@").removesuffix("+")
    return find_sign(bare) is not None and re.fullmatch(_OPTION, bare) is not None and is_secret(bare, value)
