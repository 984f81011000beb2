"""`runtime completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from typer import Argument

from runtime.cli.printing import write_text


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the completion script of a shell.

    \b
    To complete from the next terminal on:
      bash   runtime completion bash > ~/.local/share/bash-completion/completions/runtime
      zsh    runtime completion zsh > ~/.zfunc/_runtime
             (with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc)
      fish   runtime completion fish > ~/.config/fish/completions/runtime.fish
    """
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="runtime", complete_var="_RUNTIME_COMPLETE", shell=shell.value)
    write_text(script + "\n")
