"""The reader of a run's files: their content, or a BrokenFile that names the file and the fault.

A missing file is None or has no rows. A reader of many runs tells a BrokenFile, one line, and goes
on with the others.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Values = dict[str, Any]  # Any: what JSON, YAML or a checkpoint can hold


class BrokenFile(ValueError):
    """A file of a run that cannot be used; the message names the file and the fault."""

    def __init__(self, file: Path, fault: str) -> None:
        super().__init__(f"{file.name} {' '.join(fault.split())}")
        self.file = file


def read(file: Path) -> Values | None:
    """Return the mapping in a JSON or YAML file, or None if there is no such file."""
    parse = yaml.safe_load if file.suffix == ".yaml" else json.loads
    return _mapping(file, file.read_bytes(), parse) if file.is_file() else None


def known(file: Path) -> Values:
    """Return the mapping in a JSON or YAML file, or {} if it is missing or broken."""
    try:
        return read(file) or {}
    except BrokenFile:
        return {}


def read_rows(file: Path) -> list[Values]:
    """Return the whole lines of a JSONL file; [] if there is no such file."""
    return [_mapping(file, line) for line in read_lines(file).splitlines()]


def read_lines(file: Path) -> bytes:
    """Return a JSONL file up to its last line break; empty if there is no such file."""
    content = file.read_bytes() if file.is_file() else b""
    return content[: content.rfind(b"\n") + 1]


def _mapping(file: Path, content: bytes, parse: Callable[[bytes], object] = json.loads) -> Values:
    try:
        value = parse(content)
    except (ValueError, yaml.YAMLError) as error:
        raise BrokenFile(file, f"cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BrokenFile(file, f"must be a mapping, found {value!r:.40}")
    return value
