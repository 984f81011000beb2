"""The shim as one file of source text, made of the modules of this package; any Python from 3.6 on runs it.

The file holds each module's source and an importer that takes `runtime.shim` from there, so it needs nothing beside it
and may be replaced or removed while it runs. docs/decisions/shim-as-one-file.md has the measurements.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_AT_HOME: Final = {"__init__.py", "bundle.py", "bootstrap.py"}
_HEAD: Final = '''#!/usr/bin/env python3
"""Runs one job's command on any backend, with the same environment, signals, logs, deadline and result everywhere.

docs/shim.md of research-runtime describes what it does; it is made of the modules below.
"""

import sys

'''
_TAIL: Final = '''

class Modules(object):
    """Imports what `SOURCES` holds, before anything of the same name that is installed."""

    def find_spec(self, name, path=None, target=None):
        if name in SOURCES:
            return type(sys.__spec__)(name, self, is_package=name in ("runtime", "runtime.shim"))
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__name__
        exec(compile(SOURCES[name], "shim.py/%s.py" % name.replace(".", "/"), "exec"), module.__dict__)

    def get_source(self, name):
        return SOURCES[name]


sys.meta_path.insert(0, Modules())

if __name__ == "__main__":
    from runtime.shim.main import main

    sys.exit(main(sys.argv[1:]))
'''


def list_shipped() -> dict[str, Path]:
    """Module → its file, of everything that travels to machines."""
    paths = [
        _ROOT / "faults.py",
        _ROOT / "file_trust.py",
        *sorted(each for each in (_ROOT / "shim").glob("*.py") if each.name not in _AT_HOME),
    ]
    return {".".join(("runtime", *path.relative_to(_ROOT).with_suffix("").parts)): path for path in paths}


@functools.cache
def build_shim() -> bytes:
    """The content of `shim.py` on a machine. `python -` may read it from standard input, too."""
    sources = {"runtime": b"", "runtime.shim": b""}
    # As bytes: text of which one letter is not ASCII takes ten times as long to join and encode.
    sources |= {module: path.read_bytes() for module, path in list_shipped().items()}
    entries = b"".join(b"SOURCES[%r] = r'''%b'''\n\n" % (module, source) for module, source in sources.items())
    return b"%bSOURCES = {}\n%b%b" % (_HEAD.encode(), entries, _TAIL.encode())
