"""The stand-in for the context outside of an attempt; test_pool.py covers real attempts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(code: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("RUNTIME_")}
    return subprocess.run(
        [sys.executable, "-c", f"from runtime.worker.attempts.context import current_attempt\n{code}"],
        env={**base, "PYTHONPATH": str(ROOT), **environ},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_stand_in_makes_folders_here_and_never_stops(tmp_path: Path) -> None:
    code = (
        "import json\n"
        "a = current_attempt()\n"
        "assert a is current_attempt()\n"
        "scratch = a.scratch_dir; (scratch / 'x').write_text('x')\n"
        "print(json.dumps([a.task_id, a.attempt, a.token, a.deadline, a.should_stop(), a.stop_reason, str(scratch),\n"
        "  str(a.output_dir), str(a.checkpoint_dir)]))\n"
    )
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    *facts, scratch, output, checkpoints = json.loads(done.stdout)
    assert facts == ["local", 1, "local", None, False, None]
    assert (output, checkpoints) == (str(tmp_path / "output"), str(tmp_path / "checkpoints"))
    assert not Path(scratch).exists()


def test_stand_in_takes_the_environment_contract_of_a_command(tmp_path: Path) -> None:
    code = (
        "a = current_attempt()\n"
        "print(a.task_id, a.attempt, a.generation, a.token, a.experiment, a.deadline.isoformat(), a.output_dir,\n"
        "  a.scratch_dir, a.checkpoint_dir)\n"
    )
    done = run(
        code,
        tmp_path,
        RUNTIME_TASK_ID="t-7",
        RUNTIME_ATTEMPT="3",
        RUNTIME_GENERATION="2",
        RUNTIME_ATTEMPT_TOKEN="abc",
        RUNTIME_EXPERIMENT="exp",
        RUNTIME_DEADLINE="1700000000",
        RUNTIME_OUTPUT_DIR=str(tmp_path / "o"),
        RUNTIME_SCRATCH_DIR=str(tmp_path / "s"),
        RUNTIME_CHECKPOINT_DIR=str(tmp_path / "c"),
    )
    deadline = datetime.fromtimestamp(1_700_000_000, UTC).isoformat()
    folders = [str(tmp_path / name) for name in "osc"]
    assert done.stdout.split() == ["t-7", "3", "2", "abc", "exp", deadline, *folders], done.stderr
    assert (tmp_path / "s").is_dir()


def test_context_in_a_script_of_a_job_has_the_names_of_a_run(tmp_path: Path) -> None:
    code = (
        "import runtime\n"
        "run = runtime.current_attempt()\n"
        "run.report(step=3, loss=0.5)\n"
        "print(run.output, run.checkpoint, run.index, run.name)\n"
    )
    env = {
        "RUNTIME_OUTPUT_DIR": str(tmp_path / "out"),
        "RUNTIME_CHECKPOINT_DIR": str(tmp_path / "kept"),
        "RUNTIME_ARRAY_INDEX": "7",
        "RUNTIME_EXPERIMENT": "sac",
        "RUNTIME_METRICS": str(tmp_path / "metrics.jsonl"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"{tmp_path}/out {tmp_path}/kept 7 sac\n"
    assert '"loss": 0.5' in (tmp_path / "metrics.jsonl").read_text()


def test_stand_in_prints_progress_to_stderr_and_not_at_every_step(tmp_path: Path) -> None:
    code = (
        "import runtime.worker.attempts.context\n"
        "a = current_attempt()\n"
        "for i in range(1, 1001):\n"
        "    a.progress(i, 1000, 'step', loss=1 / i)\n"
        "    runtime.worker.attempts.context._SPEAK_EVERY_S = 1e9\n"
    )
    done = run(code, tmp_path)
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["progress 1/1000 step loss=1", "progress 1000/1000 step loss=0.001"]


def test_stand_in_sees_sigterm_once_it_was_asked(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "a = current_attempt()\n"
        "assert not a.should_stop()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert a.should_stop()\n"
        "print(a.stop_reason)\n"
    )
    assert run(code, tmp_path).stdout == "other\n"


def test_stand_in_leaves_a_handler_of_the_users_alone(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('mine'))\n"
        "a = current_attempt()\n"
        "a.should_stop()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(a.should_stop())\n"
    )
    assert run(code, tmp_path).stdout == "mine\nFalse\n"
