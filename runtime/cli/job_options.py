"""Options that every command that launches a job has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

CommandArgument = Annotated[
    list[str] | None, Argument(metavar="[--] CMD...", help="What to run; what follows it is its own.")
]
FileOption = Annotated[
    Path | None, Option("--file", "-f", metavar="JOB.yaml", help="A job file; `-` is standard input.")
]
NameOption = Annotated[str | None, Option(help="For people.")]
ImageOption = Annotated[str | None, Option(help="Container image, or a .sif file.")]
EnvOption = Annotated[
    list[str] | None, Option(metavar="NAME[=VALUE]", help="A variable; without a value, this shell's.")
]
SecretOption = Annotated[
    list[str] | None, Option(metavar="NAME=SOURCE", help="By reference: secret-manager://N, env://N, file://P …")
]
SetOption = Annotated[list[str] | None, Option("--set", metavar="FIELD=VALUE", help="Any field of the job file.")]
IgnoreOption = Annotated[list[str] | None, Option(metavar="FIELD", help="Drop a field that the target refuses.")]
DryRunOption = Annotated[bool, Option("--dry-run", help="Print what would be started, and start nothing.")]
CostOption = Annotated[bool, Option("--yes", "-y", help="Do not ask whether a job that costs money is to start.")]
