"""YAML for people to read: stack files that are made, and the files of clusters."""

from __future__ import annotations

from typing import Any


def dump_yaml(value: object, *, references: bool = False) -> str:
    """Render a value with its keys in order and text of several lines as it is.

    With `references`, an object that comes twice is written once.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return not references or bool(super().ignore_aliases(data))

    def represent_text(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=100_000, allow_unicode=True)
