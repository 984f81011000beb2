"""Why `sbatch` did not take a job, with the names that the cluster does have."""

from __future__ import annotations

import re
from collections.abc import Sequence

from runtime.errors import RequestRefused
from runtime.jobs.plan import (
    LaunchPlan,
)
from runtime.launchers.slurm.client import (
    SlurmClient,
)
from runtime.launchers.slurm.explain import describe_nodes


class SubmitRefused(RequestRefused):
    """Slurm does not take the job; `said` is its own sentence."""

    def __init__(self, target: str, job: str, said: str, *, facts: Sequence[str], hint: str) -> None:
        self.target, self.job, self.said = target, job, said
        super().__init__(f"slurm refused job `{job}`: {said}", facts=facts, hint=hint)


def explain_refusal(plan: LaunchPlan, client: SlurmClient, said: str) -> SubmitRefused:
    """What sbatch said, with the names that there are."""
    text = re.sub(r"^(sbatch: )?(error: )?(Batch job submission failed: )?", "", said).strip()
    lower = text.lower()
    target = plan.target.name
    facts: list[str] = []
    hint = f"see the words that were used: {plan.folder}/artefacts/sbatch.txt in the record root"
    if "policy" in lower or "submit limit" in lower:
        hint = "ask for less, wait until others of your jobs have ended, or set `max_submit` of the target"
    elif "partition" in lower and "account" not in lower:
        facts = [f"partitions on `{target}`: {', '.join(client.partitions()) or 'unknown'}"]
        hint = f"set `partition` of target `{target}`"
    elif "account" in lower:
        facts = [f"your accounts on `{target}`: {', '.join(client.names_of('account')) or 'unknown'}"]
        hint = f"set `account` of the job or of target `{target}`"
    elif "qos" in lower:
        facts = [f"your QOS on `{target}`: {', '.join(client.names_of('qos')) or 'unknown'}"]
        hint = f"set `qos` of target `{target}`"
    elif "array" in lower:
        facts = [f"MaxArraySize on `{target}`: {client.configuration('MaxArraySize') or 'unknown'}"]
        hint = f"set `max_array_size` of target `{target}` to it"
    elif "time limit" in lower:
        hint = f"shorten time_limit, or set `max_time` of target `{target}` to the partition's longest"
    elif "node configuration" in lower or "memory specification" in lower or "feature" in lower:
        facts = describe_nodes(client.nodes())
        hint = "ask for less, or for another `partition`"
    return SubmitRefused(target, plan.job.id, text, facts=facts, hint=hint)
