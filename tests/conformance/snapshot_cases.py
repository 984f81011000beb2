"""Archives that are no valid snapshot, and the expected result of restoring each, the same for every implementation."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    archive: bytes
    refused: str | None = None
    """Text of the refusal; None for an archive that is restored."""
    tree: tuple[tuple[str, str, bytes], ...] = ()
    """Name, kind or mode, and content or target of each restored entry."""


def entry(
    name: str,
    content: bytes = b"x",
    *,
    kind: bytes = tarfile.REGTYPE,
    mode: int = 0o644,
    target: str = "",
    size: int | None = None,
) -> bytes:
    made = tarfile.TarInfo(name)
    made.type, made.mode, made.linkname = kind, mode, target
    made.size = len(content) if kind in (tarfile.REGTYPE, tarfile.GNUTYPE_SPARSE) else 0
    if size is not None:
        made.size = size
    body = content if made.size else b""
    return made.tobuf(tarfile.GNU_FORMAT) + body + b"\0" * (-len(body) % tarfile.BLOCKSIZE)


def named(name: str) -> bytes:
    """Build a file whose name is in a pax header, which accepts any name."""
    made = tarfile.TarInfo("a")
    made.pax_headers = {"path": name}
    made.size = 1
    return made.tobuf(tarfile.PAX_FORMAT) + b"x" + b"\0" * 511


def archive(*entries: bytes) -> bytes:
    return b"".join(entries) + b"\0" * 1024


def link(name: str, target: str) -> bytes:
    return entry(name, kind=tarfile.SYMTYPE, target=target)


def make_cases(outside: Path) -> Sequence[Case]:
    """Build archives that try to reach the folder `outside` or the file `outside/kept`, or have unexpected entries."""
    return [
        Case(
            name="files and links",
            archive=archive(
                entry("a/b", b"one"), entry("run", b"#!", mode=0o755), link("to", "a/b"), link("up", "../x")
            ),
            tree=(("a/b", "644", b"one"), ("run", "755", b"#!"), ("to", "link", b"a/b"), ("up", "link", b"../x")),
        ),
        Case(
            name="link that points outside",
            archive=archive(link("data", str(outside))),
            tree=(("data", "link", str(outside).encode()),),
        ),
        Case(
            name="link that a file replaces",
            archive=archive(link("a", str(outside / "kept")), entry("a", b"one")),
            tree=(("a", "644", b"one"),),
        ),
        Case(name="file in a folder above", archive=archive(entry("../x")), refused="'../x' leads to a folder above"),
        Case(name="way up inside", archive=archive(entry("a/../../x")), refused="'a/../../x' leads to a folder above"),
        Case(name="way up and down", archive=archive(entry("a/../x")), refused="'a/../x' leads to a folder above"),
        Case(name="absolute", archive=archive(named("/x")), refused="'/x' is an absolute path"),
        Case(name="dot", archive=archive(entry("./x")), refused="'./x' has an empty part"),
        Case(name="empty part", archive=archive(entry("a//x")), refused="'a//x' has an empty part"),
        Case(name="no name", archive=archive(entry("")), refused="'' has an empty part"),
        Case(name="NUL", archive=archive(named("a\0b")), refused="'a\\x00b' holds a NUL"),
        Case(
            name="long part",
            archive=archive(entry("a" * 256)),
            refused=f"'{'a' * 256}' has a part of 256 bytes, and 255 is the most",
        ),
        Case(
            name="deep",
            archive=archive(entry("/".join("a" * 256))),
            refused=f"'{'/'.join('a' * 256)}' lies 256 folders deep, and 255 is the most",
        ),
        Case(name="long path", archive=archive(entry("/".join(["a" * 99] * 41))), refused="and 4095 is the most"),
        Case(
            name="long path to a link that leads outside",
            archive=archive(
                *(link("/".join([*["d" * 200] * depth, "l"]), "d" * 200) for depth in range(8)),
                entry("/".join(["l"] * 8 + ["x"])),
            ),
            refused="leads through 'l', which is no folder here",
        ),
        Case(
            name="through a link",
            archive=archive(link("a", str(outside)), entry("a/x")),
            refused="'a/x' leads through 'a', which is no folder here",
        ),
        Case(
            name="through a link to a folder inside",
            archive=archive(entry("b/y"), link("a", "b"), entry("a/x")),
            refused="'a/x' leads through 'a', which is no folder here",
        ),
        Case(
            name="link through a link",
            archive=archive(link("a", str(outside)), link("a/x", "y")),
            refused="'a/x' leads through 'a', which is no folder here",
        ),
        Case(
            name="through a file",
            archive=archive(entry("a"), entry("a/x")),
            refused="'a/x' leads through 'a', which is no folder here",
        ),
        Case(
            name="link in the place of a folder",
            archive=archive(entry("a/x"), link("a", str(outside)), entry("a/y")),
            refused="'a' is the name of a folder here",
        ),
        Case(name="link to nothing", archive=archive(link("a", "")), refused="'a' is a link to nothing"),
        Case(name="long link", archive=archive(link("a", "b" * 5000)), refused="'a' is a link of more than 4095 bytes"),
        Case(
            name="hard link",
            archive=archive(entry("a", kind=tarfile.LNKTYPE, target=str(outside / "kept"))),
            refused="'a' is neither a file nor a symbolic link",
        ),
        *(
            Case(
                name=f"type {kind.decode()}",
                archive=archive(entry("a", kind=kind)),
                refused="'a' is neither a file nor a symbolic link",
            )
            for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.CONTTYPE)
        ),
        Case(
            name="sparse file of a terabyte",
            archive=archive(_sparse("a", 1 << 40)),
            refused="'a' is neither a file nor a symbolic link",
        ),
        *(
            Case(name=f"mode {mode:o}", archive=archive(entry("a", mode=mode)), refused=f"'a' has the mode {mode:o}")
            for mode in (0o4755, 0o2755, 0o1644)
        ),
        Case(name="cut off", archive=entry("a", b"x" * 2000)[:1000], refused="'a' is cut off"),
        Case(name="negative size", archive=archive(entry("a", size=-512)), refused="'a' is cut off"),
        Case(name="more after the end", archive=archive(entry("a")) + b"x", refused="goes on after its last entry"),
        Case(name="no archive", archive=b"x" * 4096, refused="cannot be read"),
        Case(name="compressed", archive=gzip.compress(archive(entry("a"))), refused="cannot be read"),
    ]


def _sparse(name: str, size: int) -> bytes:
    """Build a header of the old GNU format that states the position of the file's only byte."""
    header = bytearray(entry(name, kind=tarfile.GNUTYPE_SPARSE))
    header[386:398] = b"%011o\0" % 0
    header[398:410] = b"%011o\0" % 1
    header[483:495] = b"%011o\0" % (size if size < 8**11 else 8**11 - 1)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)
