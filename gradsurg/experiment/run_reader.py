"""Reading of a run's files: their content, or one sentence on the fault."""

import json
import os
from pathlib import Path
from typing import Any

from gradsurg.plugins.messages import printable


class BrokenFile(ValueError):
    """A file of a run that cannot be used; the message names the file and the fault."""

    def __init__(self, file: Path, fault: str) -> None:
        super().__init__(printable(f"{file.name} {' '.join(fault.split())}"))
        self.file = file


def read_facts(file: Path) -> dict[str, Any] | None:  # Any: any JSON value
    """Return the content of `run.json`, or None if there is no such file.

    A control that is not the name of a directory in the study raises BrokenFile, and so do a seed
    that is no integer and measurements that are no mapping.
    """
    facts = read_json(file)
    if facts is None:
        return None
    controls = facts.get("controls") or {}
    if not isinstance(controls, dict):
        raise BrokenFile(file, f"controls: must be a mapping, found {controls!r:.40}")
    for key, kind in (("seed", int), ("measured", dict)):
        if not isinstance(facts.get(key) or kind(), kind):
            raise BrokenFile(file, f"{key}: must be a {kind.__name__}, found {facts[key]!r:.40}")
    for name in (facts.get("control"), *controls.values()):
        if name is not None and not _is_run_name(name):
            rule = "must be the name of a run in this study"
            raise BrokenFile(file, f"control: {rule}, found {name!r:.40}")
    return facts


def read_summary(file: Path) -> dict[str, Any] | None:  # Any: any JSON value
    """Return the content of `summary.json`, or None if there is no such file."""
    summary = read_json(file)
    if summary is not None and summary.get("state") not in ("finished", "diverged"):
        found = summary.get("state")
        raise BrokenFile(file, f"state: must be finished or diverged, found {found!r:.40}")
    for key, value in (summary or {}).items():
        if "/" in key and not isinstance(value, int | float | None):
            raise BrokenFile(file, f"{key}: must be a number, found {value!r:.40}")
    return summary


def read_config(file: Path) -> dict[str, Any] | None:  # Any: any YAML value
    """Return the content of `config.yaml`, or None if there is no such file."""
    import yaml

    content = _content(file)
    if content is None:
        return None
    try:
        return _mapping(file, yaml.safe_load(content))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenFile(file, f"is not YAML: {error}") from error


def read_json(file: Path) -> dict[str, Any] | None:  # Any: any JSON value
    """Return the mapping in a JSON file, or None if there is no such file.

    Control characters in its strings are escaped: they would reach a terminal.
    """
    content = _content(file)
    return None if content is None else _parsed(file, content)


def read_rows(file: Path) -> list[dict[str, Any]]:  # Any: any JSON value
    """Return the whole lines of a JSONL file; [] if there is no such file."""
    return [_parsed(file, line) for line in read_lines(file).splitlines()]


def last_row(file: Path) -> dict[str, Any]:  # Any: any JSON value
    """Return the last whole line of a JSONL file; {} if it has none or there is no such file."""
    lines = read_lines(file).splitlines()
    return _parsed(file, lines[-1]) if lines else {}


def read_lines(file: Path) -> bytes:
    """Return a JSONL file up to its last line break; empty if there is no such file."""
    content = _content(file) or b""
    return content[: content.rfind(b"\n") + 1]


def read_text(file: Path) -> str:
    """Return a text file line by line without control characters; empty if it cannot be read."""
    try:
        content = _content(file) or b""
    except BrokenFile:
        return ""
    return "\n".join(map(printable, content.decode(errors="replace").splitlines()))


def check_directory(folder: Path) -> None:
    """Raise BrokenFile if a run's directory or an entry of it is a link out of the study."""
    for path in (folder, *(folder.iterdir() if folder.is_dir() else ())):
        if path.is_symlink():
            _refuse_link(path, folder.parent)


def _content(file: Path) -> bytes | None:
    if file.is_symlink() or file.parent.is_symlink():
        _refuse_link(file, file.parent.parent)
    if file.exists() and not file.is_file():
        raise BrokenFile(file, "is not a file")
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BrokenFile(file, f"cannot be read: {error.strerror}") from error


def _refuse_link(path: Path, study: Path) -> None:
    target, inside = os.path.realpath(path), os.path.realpath(study)
    if os.path.commonpath([target, inside]) != inside:
        raise BrokenFile(path, "is a link to a place outside of the study")


def _parsed(file: Path, content: bytes) -> dict[str, Any]:  # Any: any JSON value
    try:
        return _mapping(file, json.loads(content))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenFile(file, f"is not JSON: {error}") from error


def _mapping(file: Path, value: object) -> dict[str, Any]:  # Any: any JSON value
    if not isinstance(value, dict):
        raise BrokenFile(file, f"must be a mapping, found {value!r:.40}")
    return _printable(value)


def _printable(value: Any) -> Any:  # Any: any JSON value
    """Escape control characters in all strings."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {_printable(key): _printable(item) for key, item in value.items()}
        case list():
            return [_printable(item) for item in value]
        case _:
            return value


def _is_run_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and Path(name).name == name
        and "\\" not in name
    )
