"""A command as a Slurm job through submitit: FOLDER for its files, then the command; held, as ours is."""

from __future__ import annotations

import sys

import submitit

executor = submitit.SlurmExecutor(folder=sys.argv[1])
executor.update_parameters(time=10, additional_parameters={"hold": True})
print(executor.submit(submitit.helpers.CommandFunction(sys.argv[2:])).job_id)
