"""The argparse parser of commands that start too often to load typer, with the errors of all other commands."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from runtime.errors import RequestRefused, UnknownName

_UNKNOWN = re.compile(r"unrecognized arguments: (\S+)")
_INVALID_CHOICE = re.compile(
    r"argument (?P<option>\S+): invalid choice: '(?P<value>.*?)' \(choose from (?P<known>.*)\)"
)


class Parser(argparse.ArgumentParser):
    """Raises a `RequestRefused` instead of printing and exiting; takes no abbreviated options."""

    def __init__(self, *, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        hint = f"`{self.prog} --help` explains each option"
        if unknown := _UNKNOWN.match(message):
            word = unknown[1].partition("=")[0]
            if word.startswith("-"):
                raise UnknownName("option", word, self._known_options(), where=f"in `{self.prog}`", hint=hint)
            raise RequestRefused(f"`{self.prog}` takes no argument `{word}`", facts=[self._usage_line()], hint=hint)
        if choice := _INVALID_CHOICE.fullmatch(message):
            known = re.findall(r"'(.*?)'", choice["known"]) or choice["known"].split(", ")
            raise UnknownName("choice", choice["value"], known, where=f"for `{choice['option']}`", hint=hint)
        text = re.sub(r"^argument (\S+): ", lambda found: f"`{found[1].split('/')[0]}` of `{self.prog}`: ", message)
        raise RequestRefused(text.replace("'", "`"), facts=[self._usage_line()], hint=hint)

    def _known_options(self) -> list[str]:
        return [name for action in self._actions if action.help != argparse.SUPPRESS for name in action.option_strings]

    def _usage_line(self) -> str:
        return " ".join(self.format_usage().split())
