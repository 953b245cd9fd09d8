"""The reader of a run's files: their content, or a BrokenFile that names the file and the fault.

A missing file is None or has no rows. A reader of many runs prints the one line of a BrokenFile,
and goes on with the other runs.
"""

import json
import os
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gradsurg.plugins.fields import RULES

Values = dict[str, Any]  # Any: what JSON, YAML or a checkpoint can hold
LARGEST = 1e150  # its square is finite: statistics of larger numbers overflow
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class _Strict(BaseModel):
    """The types of the keys of a file that readers rely on; other keys are not checked."""

    model_config = ConfigDict(strict=True)


class _Facts(_Strict):
    arm: str = ""
    label: str = ""
    seed: Count = 0
    steps: Count = 0
    control: str | None = None
    controls: dict[str, str] = {}
    measured: dict[str, int | str | None] = {}
    command: list[str] = []
    looked: int = 0
    margin_after: bool = False
    made_with: dict[str, str] = {}


class _NonFinite(_Strict):
    transform: str
    site: str
    step: int


class _Summary(_Strict):
    state: Literal["finished", "diverged"] = "finished"
    label: str = ""
    seed: Count = 0
    steps: Count = 0
    diverged_step: int = 0
    nonfinite: _NonFinite | None = None
    learned_nothing: dict[str, Number | str] = {}
    hardware: str = ""
    idle: bool = False
    notes: list[str] = []


class _Row(_Strict):
    step: Count


class _Config(_Strict):
    seed: Count = 0
    steps: Count = 0
    model: Values = {}
    task: Values = {}
    transform: Values | str = {}


_KINDS = {"run.json": _Facts, "summary.json": _Summary, "config.yaml": _Config}
_OUTCOME: TypeAdapter[object] = TypeAdapter(Number | str | None)
"""The type of a number of a summary, such as `test/loss`; null is not finite."""


class BrokenFile(ValueError):
    """A file of a run that cannot be used; the message names the file and the fault."""

    def __init__(self, file: Path, fault: str) -> None:
        super().__init__(f"{file.name} {' '.join(fault.split())}")
        self.file = file


class ForeignLink(BrokenFile):
    """A file of a run, or its folder, that is a link out of the folder of the study."""


def inside(file: Path) -> Path:
    """Return a file in a run's folder, once neither of them is a link out of the study's folder.

    The study's folder itself may be a link. Raises ForeignLink, which names the link.
    """
    study = os.path.realpath(file.parent.parent)
    for path in (file.parent, file):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(study):
            fault = "is a link out of the folder of the study, which is not followed"
            raise ForeignLink(path, fault)
    return file


def read(file: Path) -> Values | None:
    """Return the mapping in a JSON or YAML file, or None if there is no such file."""
    content = read_bytes(file)
    if content is None:
        return None
    return _mapping(file, content, yaml.safe_load if file.suffix == ".yaml" else None)


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
    content = read_bytes(file) or b""
    return content[: content.rfind(b"\n") + 1]


def read_bytes(file: Path) -> bytes | None:
    """Return the content of a file, or None if there is no such file."""
    return file.read_bytes() if inside(file).is_file() else None


def parsed(file: Path, content: bytes, parse: Callable[[bytes], object] | None = None) -> object:
    """Return the value of a JSON file's content, or of what `parse` reads."""
    try:
        return (parse or _from_json)(content)
    except (ValueError, yaml.YAMLError) as error:
        raise BrokenFile(file, f"cannot be read: {error}") from error
    except RecursionError as error:
        raise BrokenFile(file, "cannot be read: its values are nested too deeply") from error


def _mapping(file: Path, content: bytes, parse: Callable[[bytes], object] | None = None) -> Values:
    value = parsed(file, content, parse)
    if not isinstance(value, dict):
        raise BrokenFile(file, f"must be a mapping, found {value!r:.40}")
    try:
        if kind := _Row if file.suffix == ".jsonl" else _KINDS.get(file.name):
            kind.model_validate(value)
        for key in value if file.name == "summary.json" else ():
            if "/" in key:
                _OUTCOME.validate_python(value[key], strict=True)
    except ValidationError as error:
        raise BrokenFile(file, _fault(error)) from error
    return value


def _from_json(content: bytes) -> object:
    return json.loads(content, parse_constant=_no_number, parse_float=_float)


def _float(text: str) -> float:
    return number if isfinite(number := float(text)) else _no_number(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


def _fault(error: ValidationError) -> str:
    details = error.errors()[0]
    key = ".".join(map(str, details["loc"]))
    rule = RULES.get(details["type"], details["msg"]).format_map(details.get("ctx", {}))
    return f"has a wrong value: {key} {rule}, found {details['input']!r:.40}"
