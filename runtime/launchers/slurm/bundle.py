"""A launch as a folder, which is copied to a cluster without this package and submitted there by its own script.

DIR/submit.sh           submits each part once; run again, it prints the same ids
DIR/records/jobs/ID/…   the record root, with the run folder: shim, order, code, script

The job's records lie there too, wherever the folder was copied to; the target's own record root has no part in it.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Final

from runtime.errors import NotPossible
from runtime.jobs.plan import LaunchPlan, NativePart
from runtime.jobs.run_config import SNAPSHOT_FILE
from runtime.jobs.spec import BuildOn, secret_refs
from runtime.jobs.spec_fields import spec_fields
from runtime.launchers.slurm import render
from runtime.launchers.slurm.client import SCRUB
from runtime.launchers.slurm.settings import SlurmSettings, read_settings
from runtime.shim.bundle import build_shim
from runtime.snapshots.excludes import make_output_folder

RECORDS: Final = "records"


def export_bundle(plan: LaunchPlan, folder: Path, snapshot: bytes | None = None) -> list[Path]:
    """Write the bundle of a plan into a new or empty folder; returns the files.

    `snapshot` is the archive of the code, if the job has any. Raises `NotPossible` for a job with secrets, whose values
    go into no bundle, and for a job that waits for others.
    """
    _check(plan, folder, snapshot)
    run = f"{RECORDS}/{plan.folder}"
    files: dict[str, tuple[bytes, int]] = {
        "submit.sh": (render_submit(plan).encode(), 0o755),
        f"{run}/shim.py": (build_shim(), 0o700),
        # `runtime fetch` reads the run folder file by file.
        f"{run}/order.json": (_json({**plan.order, "fold": False}), 0o600),
        f"{run}/spec.json": (_json(spec_fields(plan.spec)), 0o600),
        f"{run}/bundle.json": (_json(_description(plan)), 0o600),
    }
    for name, text in plan.artefacts.items():
        files[f"{run}/artefacts/{name}"] = text.encode(), 0o700
    if snapshot is not None:
        files[f"{run}/{SNAPSHOT_FILE}"] = snapshot, 0o600
    make_output_folder(folder, marked=True)
    written = []
    for name, (content, mode) in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
        written.append(path)
    return written


def _check(plan: LaunchPlan, folder: Path, snapshot: bytes | None) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise NotPossible(f"`{folder}` is there already and not empty", hint="name a new folder")
    if refs := secret_refs(plan.spec):
        raise NotPossible(
            f"the job takes the secret `{refs[0].name}`, and no secret goes into a bundle",
            hint="let the command read it from a file on the cluster",
        )
    if plan.spec.reuse:
        raise NotPossible(
            f"the job reuses the artifact `{next(iter(plan.spec.reuse))}`, and a bundle takes the code alone",
            hint="launch it on the login node, or over ssh",
        )
    if plan.spec.after:
        raise NotPossible(
            f"the job comes after `{plan.spec.after[0]}`, whose id on Slurm a bundle cannot know",
            hint="submit it on the login node, or over ssh",
        )
    if (plan.order.get("code") or {}).get("archive") and snapshot is None:
        raise NotPossible("the job has code, and the bundle was given none")


def _description(plan: LaunchPlan) -> dict[str, object]:
    return {
        "job": plan.job.id,
        "name": plan.job.name,
        "owner": plan.job.owner,
        "target": plan.target.name,
        "kind": plan.target.kind,
        "snapshot": plan.job.snapshot,
        "indices": len(plan.indices),
        "offset": plan.spec.array.offset if plan.spec.array else 0,
        "parts": [part.name for part in plan.parts],
    }


def render_submit(plan: LaunchPlan) -> str:
    """`submit.sh`: `SlurmLauncher.submit` as a shell script.

    A try is on disk before sbatch runs, a name that the queue or accounting knows is not submitted again, and the ids are
    kept.
    """
    settings = read_settings(plan.target)
    lines = [
        "#!/bin/sh",
        f"# Submits job {plan.job.id} to Slurm, once: run again, it prints the same.",
        "set -u",
        SCRUB.rstrip("\n"),
    ]
    if settings.bin:
        lines.append(f"PATH={shlex.quote(settings.bin)}:$PATH")
    lines += [
        f'run=$(cd "$(dirname "$0")" && pwd)/{RECORDS}/{plan.folder}',
        'mkdir -p "$run/slurm" "$run/submit"',
        _FUNCTIONS.rstrip("\n"),
        *_prepare_lines(plan, settings),
        *(_submit_line(part) for part in plan.parts),
        "exit $failed",
    ]
    return "\n".join(lines) + "\n"


_FUNCTIONS: Final = r"""
failed=0
find_id() { # name: the oldest job that was not refused
    { squeue -h -t all -o '%F|%j|%r' --name="$1" 2>/dev/null | grep -v '|BadConstraints$'
      sacct -X -n -P -S now-30days --format=JobID,JobName,NodeList,State --name="$1" 2>/dev/null |
          grep -v '|None assigned|FAILED$'; } |
        sed -n 's/^\([0-9][0-9]*\)[^|]*|.*/\1/p' | sort -n | head -n 1
}
submit() { # part, name, words…
    part=$1 name=$2; shift 2
    if [ -s "$run/submit/$part.id" ]; then cat "$run/submit/$part.id"; return; fi
    if ! mkdir "$run/submit/$part.lock" 2>/dev/null; then
        echo "another submit.sh is at work, or was killed; if none is: rmdir $run/submit/$part.lock" >&2
        waited=0
        while [ -d "$run/submit/$part.lock" ] && [ $waited -lt 60 ]; do sleep 1; waited=$((waited + 1)); done
        [ -s "$run/submit/$part.id" ] && { cat "$run/submit/$part.id"; return; }
    fi
    id=$(find_id "$name")
    if [ -z "$id" ]; then
        said=$("$@" 2>"$run/submit/$part.err") || { sleep 3; said=$(find_id "$name"); }
        id=$(printf '%s\n' "$said" | sed -n 's/^\(Submitted batch job \)\{0,1\}\([0-9][0-9]*\)\(;.*\)\{0,1\}$/\2/p' | tail -n 1)
    fi
    rmdir "$run/submit/$part.lock" 2>/dev/null
    if [ -z "$id" ]; then cat "$run/submit/$part.err" >&2; failed=1; return; fi
    echo "$id" >"$run/submit/$part.new" && mv "$run/submit/$part.new" "$run/submit/$part.id"
    echo "$id"
}
"""


def _prepare_lines(plan: LaunchPlan, settings: SlurmSettings) -> list[str]:
    """Lines that make the environment on the login node, since nodes may have no network; an existing one is kept."""
    if plan.order.get("environment", {}).get("build_on") != BuildOn.SUBMIT:
        return []
    profile = settings.profile_for(plan.spec)
    lines = "\n".join(["set -e", *profile.setup, 'exec "$@"'])
    python = shlex.quote(profile.python or "python3")
    return [f'bash -lc {shlex.quote(lines)} prepare {python} "$run/shim.py" "$run" --prepare >&2 || exit 1']


def _submit_line(part: NativePart) -> str:
    words = [*part.native["words"], f"{render.FOLDER}/artefacts/{part.artefact}", *part.native["script"]]
    return " ".join(["submit", str(part.native["number"]), shlex.quote(part.name), *map(_quote_in_folder, words)])


def _quote_in_folder(word: str) -> str:
    """Quote a word, but for the run folder, which the script knows."""
    return '"$run"'.join(shlex.quote(piece) if piece else "" for piece in word.split(render.FOLDER)) or "''"


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"
