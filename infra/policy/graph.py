"""The resources of a program as a graph: which resource waits for which, and which component it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infra.check.recording import STACK_TYPE, Registration

PROVIDER_PREFIX = "pulumi:providers:"


class Graph:
    """`resources` in the order of registration."""

    def __init__(self, resources: Sequence[Registration]) -> None:
        self.resources = tuple(each for each in resources if each.type != STACK_TYPE)
        self._by_urn = {each.urn: each for each in self.resources}
        self._waits_for: dict[str, frozenset[str]] = {}

    def get(self, urn: str | None) -> Registration | None:
        return self._by_urn.get(urn or "")

    def of_type(self, *types: str) -> Iterator[Registration]:
        return (each for each in self.resources if each.type in types)

    def made(self, package: str) -> Iterator[Registration]:
        """Resources of a provider, without providers and components."""
        return (each for each in self.resources if each.custom and each.type.startswith(f"{package}:"))

    def waited_for(self, resource: Registration) -> Iterator[Registration]:
        """All resources that exist before `resource` is made: its dependencies, parents and provider, and theirs."""
        for urn in sorted(self._reach(resource.urn)):
            if found := self._by_urn.get(urn):
                yield found

    def behind(self, resource: Registration, key: str, type_: str) -> frozenset[str]:
        """URNs of the resources of `type_` that the input `key` is made from."""
        urns = resource.property_dependencies.get(key, frozenset())
        return frozenset(urn for urn in urns if (found := self._by_urn.get(urn)) and found.type == type_)

    def parent(self, resource: Registration) -> Registration | None:
        """The component that a resource belongs to; None at the top."""
        return self.get(resource.parent)

    def _reach(self, start: str) -> frozenset[str]:
        if start not in self._waits_for:
            seen: set[str] = set()
            todo = list(self._direct(start))
            while todo:
                urn = todo.pop()
                if urn in seen:
                    continue
                seen.add(urn)
                todo += self._waits_for.get(urn) or self._direct(urn)
            self._waits_for[start] = frozenset(seen)
        return self._waits_for[start]

    def _direct(self, urn: str) -> frozenset[str]:
        resource = self._by_urn.get(urn)
        if resource is None:
            return frozenset()
        behind = frozenset(each for urns in resource.property_dependencies.values() for each in urns)
        others = {resource.parent or "", (resource.provider or "").rpartition("::")[0]} - {""}
        return resource.dependencies | behind | others
