"""Checked reading of a run's files: content of the expected type, or one sentence on the fault."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gradsurg.plugins.messages import printable

if TYPE_CHECKING:
    from yaml import SafeLoader

MAX_BYTES = 1 << 20
"""Size of a JSON or YAML file; a landscape and an examination may have `MAX_LARGE_BYTES`."""
MAX_LARGE_BYTES = 1 << 28
MAX_LOG_BYTES = 1 << 32  # of a file of lines, which is read as a whole
MAX_NUMBER = 1e150  # whose square is still finite
MAX_DEPTH = 40
MAX_KEYS = 2000  # of a mapping
MAX_PLAIN_LINE = 1 << 12  # bytes, in which too few brackets fit to fill a parser's stack
TAIL = 1 << 16  # bytes at the end of a file among which its last line is looked for

Value = TypeVar("Value")


class BrokenFile(ValueError):
    """A file of a run that cannot be used; the message names the file and the fault."""

    def __init__(self, file: Path, fault: str) -> None:
        super().__init__(printable(f"{file.name} {' '.join(fault.split())}"))
        self.file = file


def read_facts(file: Path) -> dict[str, Any] | None:  # Any: any JSON value
    """Return the content of `run.json`, or None if there is no such file."""
    return _checked(file, read_json(file), _Facts)


def read_summary(file: Path) -> dict[str, Any] | None:  # Any: any JSON value
    """Return the content of `summary.json`, or None if there is no such file."""
    return _checked(file, read_json(file), _Summary)


def read_landscape(file: Path) -> dict[str, Any] | None:  # Any: any JSON value
    """Return the content of `landscape.json`, or None if there is no such file."""
    return _checked(file, read_json(file, MAX_LARGE_BYTES), _Landscape)


def read_config(file: Path) -> dict[str, Any] | None:  # Any: any YAML value
    """Return the content of `config.yaml`, or None if there is no such file.

    Aliases, which gradsurg does not write, are refused: a few lines of them fill the memory.
    """
    import yaml

    content = _content(file, MAX_BYTES)
    if content is None:
        return None
    # OmegaConf wrote plain YAML, and its own reader takes far longer.
    loader: type[SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(file, content, loader)
        return _mapping(file, _printable_strings(yaml.load(content, Loader=loader)))
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, BrokenFile):
            raise
        raise BrokenFile(file, f"is not YAML: {error}") from error


def read_json(file: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any] | None:  # Any: JSON
    """Return the mapping in a JSON file, or None if there is no such file.

    Control characters in its strings are escaped: they would reach a terminal.
    """
    content = _content(file, max_bytes)
    return None if content is None else _mapping(file, _parsed(file, content))


def read_rows(file: Path) -> list[dict[str, Any]]:  # Any: any JSON value
    """Return the whole lines of a JSONL file; [] if there is no such file."""
    return [_row(file, line) for line in read_lines(file).splitlines()]


def last_row(file: Path) -> dict[str, Any]:  # Any: any JSON value
    """Return the last whole line of a JSONL file; {} if it has none or there is no such file."""
    lines = read_lines(file, TAIL).splitlines()
    return _row(file, lines[-1]) if lines else {}


def read_lines(file: Path, tail: int = 0) -> bytes:
    """Return a JSONL file up to its last line break; empty if there is no such file.

    With `tail` only so many bytes at the end are read. A line that is wide or deep enough to stop a
    parser raises BrokenFile.
    """
    content = _content(file, MAX_LOG_BYTES, tail) or b""
    content = content[: content.rfind(b"\n") + 1]
    if b"\0" in content:
        raise BrokenFile(file, "has a zero byte")
    for line in content.splitlines():
        if len(line) <= MAX_PLAIN_LINE:
            continue
        if line.count(b'":') > MAX_KEYS:
            raise BrokenFile(file, f"has a line with more than {MAX_KEYS} keys")
        _check_depth(file, line)
    return content


def read_text(file: Path) -> str:
    """Return a text file line by line without control characters; empty if it cannot be read."""
    try:
        content = _content(file, MAX_BYTES) or b""
    except BrokenFile:
        return ""
    return "\n".join(map(printable, content.decode(errors="replace").splitlines()))


def check_directory(folder: Path) -> None:
    """Raise BrokenFile if a run's directory or an entry is a link out of the study or no file."""
    if folder.is_symlink():
        _refuse_link(folder, folder.parent)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_symlink():
            _refuse_link(path, folder.parent)
        if path.suffix in (".json", ".jsonl", ".yaml", ".log", ".pt") and not path.is_file():
            raise BrokenFile(path, "is not a file")


def _content(file: Path, max_bytes: int, tail: int = 0) -> bytes | None:
    if file.is_symlink() or file.parent.is_symlink():
        _refuse_link(file, file.parent.parent)
    try:
        size = file.stat().st_size
        if not file.is_file():
            raise BrokenFile(file, "is not a file")
        if size > max_bytes:
            raise BrokenFile(file, f"has {size} bytes, more than {max_bytes}")
        with file.open("rb") as stream:
            stream.seek(max(0, size - tail) if tail else 0)
            return stream.read()
    except FileNotFoundError:
        return None
    except MemoryError as error:
        raise BrokenFile(file, "does not fit into the memory") from error
    except OSError as error:
        raise BrokenFile(file, f"cannot be read: {error.strerror}") from error


def _refuse_link(path: Path, study: Path) -> None:
    target, inside = os.path.realpath(path), os.path.realpath(study)
    if os.path.commonpath([target, inside]) != inside:
        raise BrokenFile(path, "is a link to a place outside of the study")


def _parsed(file: Path, content: bytes) -> Any:  # Any: any JSON value
    if len(content) > MAX_PLAIN_LINE:
        _check_depth(file, content)
    try:
        return _printable_strings(json.loads(content))
    except (ValueError, OverflowError) as error:
        raise BrokenFile(file, f"is not JSON: {error}") from error


def _row(file: Path, line: bytes) -> dict[str, Any]:  # Any: any JSON value
    row = _mapping(file, _parsed(file, line))
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
        raise BrokenFile(file, f"has a line without a step, found {step!r:.40}")
    return row


def _mapping(file: Path, value: object) -> dict[str, Any]:  # Any: any JSON value
    if not isinstance(value, dict):
        raise BrokenFile(file, f"must be a mapping, found {value!r:.40}")
    return value


def _check_depth(file: Path, content: bytes) -> None:
    """Raise BrokenFile if brackets are nested too deep; those inside strings do not count."""
    depth = 0
    for token in re.finditer(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', content, re.DOTALL):
        if token[0] in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise BrokenFile(file, f"is nested deeper than {MAX_DEPTH} levels")
        elif token[0] in b"]}":
            depth -= 1


def _check_events(file: Path, content: bytes, loader: "type[SafeLoader]") -> None:
    """Raise BrokenFile for deep YAML and for aliases; events are parsed without recursion."""
    import yaml

    depth = 0
    for event in yaml.parse(content, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            raise BrokenFile(file, f"has an alias, *{event.anchor}")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise BrokenFile(file, f"is nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _printable_strings(value: Any) -> Any:  # Any: any JSON value
    """Escape control characters in all strings, and check the number and type of keys."""
    match value:
        case str():
            return printable(value)
        case dict():
            if len(value) > MAX_KEYS:
                raise ValueError(f"{len(value)} keys in one mapping, more than {MAX_KEYS}")
            strange = [key for key in value if not isinstance(key, str)]
            if strange:
                raise ValueError(f"keys must be strings, found {strange[0]!r:.40}")
            return {printable(key): _printable_strings(item) for key, item in value.items()}
        case list():
            return [_printable_strings(item) for item in value]
        case int():
            float(value)  # OverflowError: numbers are float64 in tables and charts
            return value
        case _:
            return value


def _checked(
    file: Path, content: dict[str, Any] | None, kind: type[BaseModel]
) -> dict[str, Any] | None:  # Any: any JSON value
    if content is None:
        return None
    try:
        kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        text = first["msg"].removeprefix("Value error, ")
        text = text[:1].lower() + text[1:]
        found = "" if first["type"] == "value_error" else f", found {first['input']!r:.40}"
        raise BrokenFile(file, f"{place}: {text}{found}" if place else text) from error
    return content


def _name(text: str) -> str:
    if text in ("", ".", "..") or Path(text).name != text or "\\" in text:
        raise ValueError(f"must be the name of a run in this study, found {text!r:.40}")
    return text


_RunName = Annotated[str, AfterValidator(_name)]
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Seed = Annotated[int, Field(ge=-(2**64), le=2**64)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Measured(_Checked):
    metric: str | None = None


class _Facts(_Checked):
    arm: Literal["treated", "control"] | None = None
    label: str | None = None
    seed: _Seed | None = None
    steps: _Count | None = None
    control: _RunName | None = None
    controls: dict[str, _RunName] | None = None
    measured: _Measured | None = None


_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Place = Annotated[list[_Finite], Field(min_length=2, max_length=2)]
_Axis = Annotated[list[_Finite], Field(min_length=2)]


class _Landscape(_Checked):
    x1: _Axis
    x2: _Axis
    start: _Place
    values: Annotated[dict[str, list[list[_Finite]]], Field(min_length=1)]
    pareto: list[_Place]
    closed: bool = False

    @model_validator(mode="after")
    def _shapes(self) -> "_Landscape":
        for name, rows in self.values.items():
            if [len(row) for row in rows] != [len(self.x1)] * len(self.x2):
                raise ValueError(f"values.{name} must have a row for each of x2, of the size of x1")
        if self.closed and not self.pareto:
            raise ValueError("pareto is closed and has no points")
        return self


class _LearnedNothing(_Checked):
    metric: str
    beside: float
    what: str


class _Summary(_Checked):
    state: Literal["finished", "diverged"]
    arm: Literal["treated", "control"] | None = None
    label: str | None = None
    seed: _Seed | None = None
    steps: _Count | None = None
    skipped_steps: _Count | None = None
    diverged_step: _Count | None = None
    effects_every: _Count | None = None
    hardware: str | None = None
    until: str | None = None
    notes: list[str] = []
    learned_nothing: _LearnedNothing | Annotated[dict[str, object], Field(max_length=0)] = {}

    @model_validator(mode="after")
    def _target(self) -> "_Summary":
        extra = self.model_extra or {}
        reached, step = extra.get("until/reached"), extra.get("until/step")
        if reached is not None and self.until is None:
            raise ValueError("until/reached needs until, which is missing")
        if self.until is not None and reached is None:
            raise ValueError("until needs until/reached, which is missing")
        if reached and step is None:
            raise ValueError("until/reached needs until/step, which is missing")
        return self

    @model_validator(mode="before")
    @classmethod
    def _finite(cls, content: Mapping[str, object]) -> Mapping[str, object]:
        for key, value in content.items():
            if "/" not in key or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{key} must be a number, found {value!r:.40}")
            if not abs(value) <= MAX_NUMBER:
                raise ValueError(f"{key} must be at most {MAX_NUMBER:g} in size, found {value}")
        return content
