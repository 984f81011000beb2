"""Stand-ins for Slurm's commands: `sbatch` runs the tasks' scripts here, one after another, and `sacct` reports how they ended.

Nothing waits or is requeued: they serve tests of submission and of ended jobs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.shim_support import wait_for

_SBATCH = r"""
import os, re, subprocess, sys
folder = FOLDER
options = [word for word in sys.argv[1:] if word.startswith("--")]
script = [word for word in sys.argv[1:] if not word.startswith("--")]
given = dict(word[2:].partition("=")[::2] for word in options)
number = len(open(folder + "/calls").readlines()) + 1 if os.path.exists(folder + "/calls") else 1
with open(folder + "/calls", "a") as calls:
    calls.write("\t".join(sys.argv[1:]) + "\n")
tasks = [None]
if "array" in given:
    tasks = []
    for part in given["array"].partition("%")[0].split(","):
        first, _, last = part.partition("-")
        tasks += range(int(first), int(last or first) + 1)
print(number, flush=True)
if os.fork():
    os._exit(0)
os.setsid()
for stream in (0, 1, 2):
    os.dup2(os.open(os.devnull, os.O_RDWR), stream)
for task in tasks:
    env = {key: value for key, value in os.environ.items() if key != "RUNTIME_FAULTS"}
    env["SLURM_JOB_ID"] = env["SLURM_ARRAY_JOB_ID"] = str(number)
    log = given["output"].replace("%A", str(number)).replace("%j", str(number)).replace("%a", str(task))
    if task is not None:
        env["SLURM_ARRAY_TASK_ID"] = str(task)
    with open(log, "ab") as out:
        code = subprocess.run(["bash", *script], env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL).returncode
    name = str(number) if task is None else "%d_%d" % (number, task)
    state = "FAILED|%d:0" % code if code else "COMPLETED|0:0"
    with open(folder + "/ended", "a") as ended:
        ended.write("%s|%s|%s|n1|2026-01-31T12:00:00|None\n" % (name, given["job-name"], state))
open("%s/done.%d" % (folder, number), "w").close()
"""
_SACCT = r"""
import os, sys
folder = FOLDER
wanted = [word.partition("=")[2].split(",") for word in sys.argv if word.startswith("--jobs=")]
lines = open(folder + "/ended").read().splitlines() if os.path.exists(folder + "/ended") else []
for line in lines:
    number = line.partition("|")[0]
    if "--duplicates" not in sys.argv and wanted and {number, number.partition("_")[0]} & set(wanted[0]):
        print(line)
"""


class SlurmCommands:
    """A folder of commands, for the setting `bin` of a target."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir(parents=True)
        for name, program in (("sbatch", _SBATCH), ("sacct", _SACCT), ("squeue", ""), ("scontrol", "")):
            path = self.bin / name
            path.write_text(f"#!{sys.executable}\n{program.replace('FOLDER', repr(str(folder)))}")
            path.chmod(0o755)

    def wait(self) -> None:
        """Wait until all tasks that were submitted so far have ended."""
        for number in range(1, len(self.submitted()) + 1):
            wait_for((self.folder / f"done.{number}").exists, f"the end of job {number}")

    def submitted(self) -> list[dict[str, str]]:
        """Return the options of each sbatch call so far."""
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        words = [[word[2:] for word in line.split("\t") if word.startswith("--")] for line in lines]
        return [{word.partition("=")[0]: word.partition("=")[2] for word in each} for each in words]
