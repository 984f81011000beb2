"""What a terminal may obey or cannot show is spelled; everything else passes unchanged."""

from __future__ import annotations

import json

import pytest

from runtime.sanitize import LogCleaner, clean, clean_json, clean_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1bP1$r\x1b\\", "\\x1bP1$r\\x1b\\"),
        ("\x9b6n", r"\x9b6n"),
        ("a\rb\x08c\x7f\x00", r"a\rb\x08c\x7f\x00"),
        ("abc\u202etxt.exe\u202c", r"abc\u202etxt.exe\u202c"),
        ("\u2066a\u2069", r"\u2066a\u2069"),
        ("ad\u200bmin\ufeff\u2060\u00ad", r"ad\u200bmin\ufeff\u2060\xad"),
        ("line\u2028line\u0085", r"line\u2028line\x85"),
        ("tag\U000e0041", r"tag\U000e0041"),
        ("name\udcff", r"name\udcff"),
        ("blank\u3164", r"blank\u3164"),
    ],
)
def test_text_that_commands_hides_or_reorders_is_spelled(text: str, shown: str) -> None:
    assert clean(text) == shown
    assert clean(shown) == shown


@pytest.mark.parametrize(
    "text", ["", "plain", "two\n\tlines", "Grüße, 実験, שלום, नमस्ते", "e\u0301", "❤\ufe0f", "a\u00a0b", "\ue0b0"]
)
def test_text_that_a_terminal_only_shows_is_unchanged(text: str) -> None:
    assert clean(text) == text
    assert clean_json(text) == text
    assert LogCleaner().feed(text.encode(), last=True) == text


def test_line_has_no_break_and_drops_no_character() -> None:
    assert clean_line(" a\r\n\tb\n\nc\x0bd\re ") == r"a b c\x0bd\re"


@pytest.mark.parametrize("hostile", ["\x9b6n", "\u202e", "\u2028", "\x7f", "\U000e0041", "\x1b]0;x\x07", "\udcff"])
def test_json_has_the_same_value_without_the_character(hostile: str) -> None:
    document = json.dumps({hostile: [hostile]}, ensure_ascii=False, indent=2)

    cleaned = clean_json(document)

    assert json.loads(cleaned) == {hostile: [hostile]}
    assert cleaned.isascii()


OBEYED = [
    b"\x1b]52;c;cm0gLXJm\x07",
    b"\x1b]0;title\x1b\\",
    b"\x1bP+q544e\x1b\\",
    b"\x1b[2A\x1b[2K",
    b"\x1b[?1049h",
    b"\x1b[c",
    b"\x1b[6n",
    b"\x1b[>0q",
    b"\x1bc",
    b"\x1b#8",
    b"\x1b(0",
    b"\x1b[0;1$r",
    b"\x1b[1 m",
    b"\x1b[?25m",
    b"\x1b[" + b"1;" * 100 + b"m",
    b"\xc2\x9b6n",
    b"\x9b6n",
    "\u202e".encode(),
    b"\x0e\x0f\x05",
]


@pytest.mark.parametrize("sequence", OBEYED)
def test_log_sequence_is_neutralised_however_it_is_split(sequence: bytes) -> None:
    log = b"before " + sequence + b" after\n"
    shown = {
        first + second + cleaner.end()
        for at in range(len(log) + 1)
        for cleaner in [LogCleaner()]
        for first, second in [(cleaner.feed(log[:at]), cleaner.feed(log[at:]))]
    }
    cleaner = LogCleaner()
    shown.add("".join(cleaner.feed(bytes([byte])) for byte in log) + cleaner.end())

    [text] = shown
    assert text.startswith("before ")
    assert text.endswith(" after\n")
    assert not set(text) & {*map(chr, (*range(9), *range(11, 32), *range(127, 160))), "\u202e"}


def test_log_keeps_colours_and_progress_bars_however_they_are_split() -> None:
    log = "\x1b[1;31mloss\x1b[0m\tü\r 50 %\b\r\n\x1b[38;2;1;2;3mx\x1b[m\n".encode()

    for at in range(len(log)):
        cleaner = LogCleaner()
        assert cleaner.feed(log[:at]) + cleaner.feed(log[at:]) + cleaner.end() == log.decode()


@pytest.mark.parametrize(
    ("log", "end"),
    [
        (b"\x1b[31mred", "\x1b[0m"),
        (b"\x1b[8mhidden\n", "\x1b[0m"),
        (b"\x1b[31mred\x1b[m", ""),
        (b"\x1b[31mred\x1b[0;0m", ""),
        (b"\x1b[0;1mbold", "\x1b[0m"),
        (b"plain", ""),
        (b"plain\x1b[3", r"\x1b[3"),
        (b"\xe2\x82", r"\xe2\x82"),
    ],
)
def test_log_that_ends_in_a_colour_gives_the_terminal_back_as_it_was(log: bytes, end: str) -> None:
    cleaner = LogCleaner()
    cleaner.feed(log)

    assert cleaner.end() == end
