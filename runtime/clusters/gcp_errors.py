"""The meaning of Google's errors about TPUs that it does not create: whether to wait, and the next step."""

from __future__ import annotations

import re
from typing import Final

_TOO_MANY: Final = re.compile(r"per (?:second|minute)|rate.?limit|too many requests", re.IGNORECASE)
_STEPS: Final = (
    ("capacity|stockout", "try again later, another size, or another `--capacity`"),
    ("reservation", "`gcloud compute reservations list` shows the reservations; name one with `--reservation`"),
    ("quota", "`runtime cluster status` shows what holds quota; more of it is asked for in Google's console"),
    (
        "permission|serviceaccount|act as",
        "the stack gives these rights to its `operators`: ask for your name there, then `pulumi up`",
    ),
    ("already exists", "choose another name with `--name NAME`"),
    ("accelerator|location", "`gcloud compute tpus accelerator-types list --zone ZONE` shows the types of a zone"),
    (
        "runtime|version",
        "`gcloud compute tpus tpu-vm versions list --zone ZONE` shows the software; name it with `--runtime-version`",
    ),
)
AGAIN: Final = "run the same command again; it goes on from what is there"


def is_too_many(words: str) -> bool:
    """Whether these words for code 429 are about requests, and so pass, and not about a quota of TPUs or a stock-out."""
    return _TOO_MANY.search(words) is not None


def find_next_step(words: str) -> str:
    """Return what to do after a refusal in these words."""
    return next((step for form, step in _STEPS if re.search(form, words, re.IGNORECASE)), AGAIN)
