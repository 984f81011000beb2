"""What was submitted: experiments, and the manifest parts that list their tasks."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.clock import Clock
from runtime.errors import PartTaken, StoreUnavailable
from runtime.records import codec
from runtime.records.base import (
    ExperimentSeen,
    ManifestPart,
)
from runtime.records.blobs.base import Blobs
from runtime.records.layout import EXPERIMENT, PART, experiment_key, experiment_of, matched
from runtime.records.objects import Objects
from runtime.tasks.model import experiment_digest, hex_digest
from runtime.values import replace


class BlobExperiments(Objects):
    """Names of experiments, each written down with the first task of it."""

    def __init__(self, blobs: Blobs, *, clock: Clock | None = None) -> None:
        super().__init__(blobs, clock=clock)
        self._known_experiments: set[str] = set()

    def put_experiment(self, experiment: str, *, queue: str | None) -> None:
        key = experiment_key(experiment)
        seen = ExperimentSeen(experiment, self._clock.now(), queue)
        existing = self._create_or_read(key, codec.encode_experiment(seen))
        self._known_experiments.add(experiment)
        if existing is None or queue is None:
            return
        for known in self._decoded(key, existing, codec.decode_experiment):
            if known.queue != queue:
                self.blobs.put(key, codec.encode_experiment(replace(known, queue=queue)))

    def experiments(self) -> list[ExperimentSeen]:
        keys = (found[0] for found in matched(self.blobs.list_keys("experiments/"), EXPERIMENT))
        found = self._read_all(keys)
        seen = (one for key, data in found for one in self._decode_experiment(key, data))
        return sorted(seen, key=lambda one: one.name)

    def _decode_experiment(self, key: str, data: bytes) -> list[ExperimentSeen]:
        """One that cannot be decoded is known by its name alone, and by nothing where that was cut."""
        decoded = self._decoded(key, data, codec.decode_experiment)
        name = experiment_of(key)
        return decoded or ([] if name is None else [ExperimentSeen(name, None)])

    def find_experiment(self, experiment: str) -> ExperimentSeen | None:
        key = experiment_key(experiment)
        data = self.blobs.get(key)
        if data is None:
            return None
        return next(iter(self._decoded(key, data, codec.decode_experiment)), ExperimentSeen(experiment, None))

    def _see_experiment(self, experiment: str) -> None:
        if experiment not in self._known_experiments:
            self.put_experiment(experiment, queue=None)


class BlobManifests(BlobExperiments):
    """Manifest parts, create-only by index."""

    def put_part(self, experiment: str, index: int, lines: Sequence[str]) -> ManifestPart:
        """Create-only by index: the same lines again are the same part, others raise `PartTaken`."""
        if any("\n" in line for line in lines):
            raise ValueError("a manifest line holds a line break")
        data = "".join(f"{line}\n" for line in lines).encode()
        name = f"{index:05}-{len(lines)}-{hex_digest(data)[:16]}"
        digest = experiment_digest(experiment)
        self._see_experiment(experiment)
        # The index is claimed first: two submitters of different tasks must not both get it.
        claimed = self._create_or_read(f"claims/{digest}/{index:05}", name.encode())
        if claimed is not None and claimed != name.encode():
            raise PartTaken(experiment, index)
        asked = self._clock.now()
        if self.blobs.create(f"manifests/{digest}/{name}.jsonl", data):
            self._skew.fresh = f"manifests/{digest}/{name}.jsonl", asked, self._clock.now()
        sent = claimed is not None and self.blobs.get(f"manifests/{digest}/{name}.sent") is not None
        return ManifestPart(experiment, name, len(lines), sent=sent)

    def parts(self, experiment: str) -> list[ManifestPart]:
        written: list[tuple[int, int, str]] = []
        sent: set[str] = set()
        for found in matched(self.blobs.list_keys(f"manifests/{experiment_digest(experiment)}/"), PART):
            if found[4] == "sent":
                sent.add(found[1])
            else:
                written.append((int(found[2]), int(found[3]), found[1]))
        return [ManifestPart(experiment, name, count, sent=name in sent) for _, count, name in sorted(written)]

    def read_part(self, part: ManifestPart) -> list[str]:
        key = f"manifests/{experiment_digest(part.experiment)}/{part.name}.jsonl"
        data = self.blobs.get(key)
        if data is None:
            raise StoreUnavailable(f"manifest part `{self._address(key)}` is gone", retryable=False)
        if not part.name.endswith(hex_digest(data)[:16]):
            raise codec.damaged(self._address(key), "its digest is not the one in its name")
        return data.decode(errors="replace").split("\n")[:-1]

    def mark_sent(self, part: ManifestPart) -> None:
        self.blobs.create(f"manifests/{experiment_digest(part.experiment)}/{part.name}.sent", b"")
