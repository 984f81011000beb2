"""`python -m tests.engine.record_baseline STACK`: save a stack's state as this release creates it.

Later releases are tested against it: protected resources must survive the upgrade. A baseline is written once for
each release and never again, so the command refuses to overwrite one. Needs the `pulumi` command.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import runtime
from tests.engine.harness import Lab
from tests.engine.test_pipeline import bootstrap

FOLDER = Path(__file__).parent / "baselines"
LEFT_OUT = ("sourcePosition", "stackTrace", "created", "modified", "propertyDependencies")
LONG = 400
SECRET = "4dabf18193072939515e22adb298388d"
"""Marks an encrypted value. Here these are only effective labels, which the SDK marks as secret without need."""


def main(stack: str) -> None:
    path = FOLDER / f"{stack}-{runtime.__version__}.json"
    if path.exists():
        sys.exit(f"error: {path.name} is there already; a baseline is what a release made, and does not change")
    engine = shutil.which("pulumi")
    if engine is None:
        sys.exit("error: no `pulumi` on PATH")
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder) / "lab", str(Path(engine).parent))
        lab.init(stack)
        if lab.setting(stack, "deployer") is not None:
            bootstrap(lab)
        lab.up(stack)
        exported = portable(lab.export(stack))
    FOLDER.mkdir(exist_ok=True)
    path.write_text(as_text(exported))
    print(f"{path.name}: {path.stat().st_size} bytes")


def as_text(exported: Mapping[str, Any]) -> str:
    """Format as JSON with one line per resource."""
    resources = exported["deployment"]["resources"]
    frame = json.dumps({**exported, "deployment": {**exported["deployment"], "resources": ["HERE"]}}, sort_keys=True)
    lines = ",\n".join(json.dumps(each, sort_keys=True) for each in resources)
    return frame.replace('"HERE"', f"\n{lines}\n") + "\n"


def portable(exported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state without secrets, keys, machine-specific values, and grants, which are never protected.

    Long texts (boot scripts) are cut: an upgrade changes them in place anyway.
    """
    deployment = exported["deployment"]
    kept = [each for each in deployment["resources"] if not each["type"].endswith(("IAMMember", "IamMember"))]
    urns = {each["urn"] for each in kept}
    return {
        "version": exported["version"],
        "deployment": {
            "manifest": {**deployment["manifest"], "time": "2026-01-01T00:00:00Z"},
            "resources": [_portable(each, urns) for each in kept],
        },
    }


def _portable(resource: Mapping[str, Any], urns: set[str]) -> dict[str, Any]:
    portable = {key: value for key, value in resource.items() if key not in LEFT_OUT}
    for key in ("inputs", "outputs"):
        if key in portable:
            portable[key] = _cut({name: value for name, value in portable[key].items() if not _is_secret(value)})
    if "dependencies" in portable:
        portable["dependencies"] = [urn for urn in portable["dependencies"] if urn in urns]
    return portable


def _cut(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cut(item) for item in value]
    return value[:LONG] if isinstance(value, str) else value


def _is_secret(value: Any) -> bool:
    return isinstance(value, Mapping) and SECRET in value


if __name__ == "__main__":
    main(sys.argv[1])
