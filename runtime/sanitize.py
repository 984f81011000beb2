"""Text on a terminal: what would command the terminal, or hide or reorder other text, is spelled as an escape instead.

The error of a task, the name of a file or a branch and the answer of a server may hold any character, and a terminal
obeys some: it writes to the clipboard, answers a query as if somebody had typed, or moves its cursor over earlier lines.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator

_CONTROLS = "\\x00-\\x07\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f"
"""C0 but for backspace, tab, newline and carriage return; DEL; C1, which terminals read like ESC with a letter."""

# Default_Ignorable_Code_Point of https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt, which fonts
# show as nothing and which has the overrides of direction; separators and annotations of lines; lone surrogates. The
# selectors U+FE0E and U+FE0F stay: they only choose between the black and the coloured form of the character before.
_HIDDEN = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0d"
    "\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff\ud800-\udfff"
)
_UNSAFE = f"[{_CONTROLS}\\x08\\r{_HIDDEN}]"
_UNSAFE_IN_LOG = rf"(\x1b\[[0-9;:]{{0,64}}m)|[{_CONTROLS}{_HIDDEN}]"
_BEGUN = r"\x1b(?:\[[0-9;:]{0,64})?\Z"
LINE_BYTES = 10_000
"""Most bytes of a line of a log on a terminal."""


def clean(text: str) -> str:
    r"""Return `text` with each such character spelled: `\x1b`, `\u202e`. Tabs and newlines stay."""
    return text if _is_plain(text) else _replace(_UNSAFE, _spell, text)


def clean_line(text: str) -> str:
    """Return `text` cleaned and on one line: blanks, tabs and newlines in a row become one blank."""
    for blank in ("\r\n", "\n", "\t"):
        text = text.replace(blank, " ")
    return clean(" ".join(filter(None, text.split(" "))))


def clean_json(text: str) -> str:
    r"""Return a JSON document of the same value with each such character as JSON spells it: `\u001b`."""
    return text if _is_plain(text) else _replace(_UNSAFE, _spell_json, text)


class LogCleaner:
    """Cleans a log piece by piece. Colours, tabs, backspaces and carriage returns stay, as progress bars need them.

    A sequence may be split over two pieces: its beginning is kept until the rest has come.
    """

    def __init__(self) -> None:
        import codecs

        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._begun = ""
        self._coloured = False

    def feed(self, piece: bytes, *, last: bool = False) -> str:
        text = self._begun + self._decoder.decode(piece, last)
        self._begun = ""
        if not last and "\x1b" in text[-70:]:
            import re

            if begun := re.search(_BEGUN, text):
                text, self._begun = text[: begun.start()], begun[0]
        return text if _is_plain(text) else _replace(_UNSAFE_IN_LOG, self._pass, text)

    def end(self) -> str:
        """Return the kept text, and the end of a colour that the log did not end."""
        return self.feed(b"", last=True) + ("\x1b[0m" if self._coloured else "")

    def _pass(self, found: re.Match[str]) -> str:
        if found[1] is None:
            return _spell(found)
        self._coloured = bool(found[1].strip("\x1b[0;:m"))
        return found[1]


class CleanLogger:
    """The logger of the module `name`. Its lines are cleaned: where nobody set up logging, Python prints them on stderr.

    The first line loads `logging`, which takes as long as a small command.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def info(self, text: str, *values: object) -> None:
        self._log("info", text, *values)

    def warning(self, text: str, *values: object) -> None:
        self._log("warning", text, *values)

    def exception(self, text: str, *values: object) -> None:
        """Log the exception that is being handled, with its traceback."""
        import traceback

        self._log("error", f"{text}\n%s", *values, traceback.format_exc().rstrip())

    def _log(self, level: str, text: str, *values: object) -> None:
        import logging

        getattr(logging.getLogger(self._name), level)("%s", clean(text % values if values else text))


def cut_lines(pieces: Iterator[bytes], limit: int = LINE_BYTES) -> Iterator[bytes]:
    """Yield the pieces with long lines cut, and the number of bytes left out of each."""
    length = 0
    for piece in pieces:
        shown = []
        for line in piece.splitlines(keepends=True):
            ends = line.endswith((b"\n", b"\r"))
            text = line[:-1] if ends else line
            shown.append(text[: max(0, limit - length)])
            length += len(text)
            if ends:
                shown.append(_rest(length - limit) + line[-1:])
                length = 0
        if whole := b"".join(shown):
            yield whole
    if length > limit:
        yield _rest(length - limit)


def _rest(count: int) -> bytes:
    return b" [%d more bytes of this line]" % count if count > 0 else b""


def _is_plain(text: str) -> bool:
    """Return whether `text` certainly has no such character, without loading `re`."""
    return text.isascii() and text.replace("\n", "").isprintable()


def _replace(pattern: str, spell: Callable[[re.Match[str]], str], text: str) -> str:
    import re

    return re.sub(pattern, spell, text)


def _spell(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _spell_json(found: re.Match[str]) -> str:
    import json

    return json.dumps(found[0])[1:-1]
