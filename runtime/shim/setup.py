"""Lines of setup before a command, and how they kept it from running."""

import io
import os

from runtime.shim.words import shell_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Optional, Tuple

SETUP_FAILED = "setup_failed"
"""File of an attempt's folder that says how what comes before the command went wrong."""
TELL_SETUP = """trap 'echo "the setup lines ended with exit code $?${BASH_COMMAND:+, at: $BASH_COMMAND}" """
TELL_SETUP += """>"${RUNTIME_PREEMPTED_NOTE%/*}/""" + SETUP_FAILED + """"' EXIT; trap 'trap - EXIT; exit 143' TERM"""
"""Line of shell before the setup lines. A shell that reaches the command becomes it and leaves no file; nor does a shell
that is ended from outside, as when another rank has failed."""
NAME_SETUP = 'runtime_setup="${RUNTIME_PREEMPTED_NOTE%/*}/setup.$RUNTIME_RANK"'
"""Line of shell that names the file which the shim writes for a rank with setup lines; they may change the variables."""
END_SETUP = 'true 2>/dev/null >|"$runtime_setup"'
"""Line of shell right before the command, which empties that file. Emptying takes no room on a full disk, and `true` is
no special builtin, whose redirection would end the shell where it fails."""


def setup_script(lines: "List[str]", last: bool = True) -> str:
    """Shell that becomes the words after it once the setup lines are through; `last` unless more such lines follow."""
    script = ["set -e", TELL_SETUP, NAME_SETUP] + list(lines) + ["set +e"]
    return "\n".join(script + [END_SETUP] * last + ['exec "$@"'])


class SetupLines(object):
    """Whether the setup lines of each rank reached its command, as files in the attempt's folder say."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.files: "Dict[int, str]" = {}

    def expect(self, rank):
        """Write the file that the setup lines of a rank empty at their end."""
        path = os.path.join(self.folder, "setup.%d" % rank)
        try:
            with io.open(path, "w", encoding="utf-8") as opened:
                opened.write("not at its command yet\n")
            self.files[rank] = path
        except (IOError, OSError):
            pass  # a full disk: only the trap of the shell says then that the lines ended it

    def find_failure(self, ended: "List[Tuple[int, int]]") -> "Optional[str]":
        """How the setup lines kept a command from running, None if they did not. `ended` are ranks and their exit codes."""
        try:
            with io.open(os.path.join(self.folder, SETUP_FAILED), encoding="utf-8", errors="replace") as opened:
                return opened.read(2000).strip()
        except (IOError, OSError):
            return self.find_unreached(ended)

    def find_unreached(self, ended: "List[Tuple[int, int]]") -> "Optional[str]":
        """How setup lines of ranks on this machine failed whose shell left no file about it."""
        for rank, code in ended:
            try:
                if rank in self.files and os.stat(self.files[rank]).st_size:
                    return "the setup lines ended with exit code %d, before the command" % shell_code(code)
            except OSError:
                continue
        return None

    def forget(self):
        for path in self.files.values():
            try:
                os.unlink(path)
            except OSError:
                pass
