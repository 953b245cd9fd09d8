"""Damaged run folders, given to the report and to the command."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from unittest.mock import patch

from fuzz_watch import Fault, Outcome, watched

from gradsurg.report import __main__ as report
from gradsurg.report import figures
from gradsurg.run import main as train

SECRET = "a-line-of-somebody-else"
TRAIN = ["transform=clip", "model=mlp", "model.hidden=[4]"]
TASKS = ["aggregator=pcgrad", "task=overlay", "model=multi_head"]
OPTIONS = ["steps=20", "seeds=1", "logger=none", "log_every=5", "effects_every=5"]
OPTIONS += ["checkpoint_every=5", "checkpoint_seconds=0", "study=first", "report=false"]
FIGURES_EVERY = 10  # cases: to convert them takes a second and does not read the files


def prepare() -> None:
    """Called once, before the first case."""


def case(seed: str, folder: Path) -> Iterator[Outcome]:
    """Damage the files of a finished study in `folder`, and yield the outcomes of commands on it.

    Every random choice follows from `seed`.
    """
    chance = Random(seed)
    damages = "; ".join(_prepare(folder, chance))
    converted = chance.randrange(FIGURES_EVERY) == 0
    write = figures.write_figure if converted else _write_specification
    training = chance.choice((TRAIN, TASKS))
    study, private = folder / "runs" / "first", folder / "private"
    before = _contents(private)
    commands = {
        _report: [str(study)],
        train: [*training, *OPTIONS, f"out={folder / 'runs'}"],
    }
    for command, words in commands.items():
        with patch.object(figures, "write_figure", write):
            outcome = watched(command, words, [folder / "runs"])
        outcome.words = [*words, f"({damages})"]
        if _contents(private) != before:
            outcome.faults.append(Fault("written outside", "another folder was changed"))
        if _reads_secret(outcome, study / "report"):
            outcome.faults.append(Fault("read outside", "another folder is shown"))
        if "\x1b" in outcome.out + outcome.err:
            outcome.faults.append(Fault("control characters", outcome.out + outcome.err))
        yield outcome


def _report() -> None:
    sys.exit(report.main())


def _write_specification(figure: figures.Figure, folder: Path) -> Path:
    file = folder / f"{figure.name}.png"
    file.write_text(json.dumps(figures.figure_spec(figure)), encoding="utf-8")
    return file


def _contents(folder: Path) -> list[tuple[str, int, bytes]]:
    files = sorted(folder.iterdir())
    return [(path.name, path.lstat().st_mtime_ns, path.read_bytes()) for path in files]


def _reads_secret(outcome: Outcome, folder: Path) -> bool:
    if SECRET in outcome.out + outcome.err:
        return True
    if folder.is_symlink() or not folder.is_dir():
        return False
    files = [path for path in folder.iterdir() if path.is_file()]
    return any(SECRET.encode() in path.read_bytes() for path in files)


@cache
def _template() -> Path:
    """Train a study of one loss and of two, report it, and return its parent folder."""
    out = Path(mkdtemp(prefix="fuzz-template-"))
    commands = [["gradsurg.run", *words, *OPTIONS, f"out={out}"] for words in (TRAIN, TASKS)]
    for words in (*commands, ["gradsurg.report", str(out / "first")]):
        command = [sys.executable, "-m", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def _prepare(place: Path, chance: Random) -> list[str]:
    """Copy the study beside a folder of somebody else and damage it; return the damages."""
    shutil.copytree(_template(), place / "runs")
    private = place / "private"
    private.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "run.json", "checkpoint.pt"):
        (private / name).write_text(f"{SECRET}: 1\n", encoding="utf-8")
    runs = sorted(path for path in (place / "runs" / "first").iterdir() if path.name != "report")
    for path in runs:
        if chance.random() < 0.5:  # it was interrupted
            (path / "summary.json").unlink()
    return [_damage(chance, runs, private) for _ in range(chance.randint(1, 3))]


def _damage(chance: Random, runs: list[Path], private: Path) -> str:
    run = chance.choice([path for path in runs if path.is_dir() and not path.is_symlink()] or runs)
    files = sorted(path for path in run.iterdir() if path.is_file()) if run.is_dir() else []
    damages = [_truncate, _flip, _replace, _change_value, _remove, _link_file, _insert]
    damage = chance.choice([*damages, *damages, _link_folder, _names, _wide_row])
    if damage in (_link_folder, _names, _wide_row):
        return f"{damage.__name__}({run.name}) {damage(chance, run, private)}"
    if not files:
        return "nothing left to damage"
    file = chance.choice(files)
    return f"{damage.__name__}({run.name}/{file.name}) {damage(chance, file, private)}"


def _truncate(chance: Random, file: Path, _: Path) -> str:
    content = file.read_bytes()
    size = chance.randrange(len(content) + 1)
    file.write_bytes(content[:size])
    return f"to {size} bytes"


def _flip(chance: Random, file: Path, _: Path) -> str:
    content = bytearray(file.read_bytes())
    for _bit in range(chance.choice((1, 1, 30)) if content else 0):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return ""


def _replace(chance: Random, file: Path, _: Path) -> str:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + k)}: &{chr(98 + k)} [{', '.join(['*' + chr(97 + k)] * 9)}]\n" for k in range(9)
    )
    contents = {
        "nothing": "",
        "null": "null\n",
        "number": "3\n",
        "text": '"text"\n',
        "list": "[1, 2]\n",
        "half": "{half\n",
        "mapping": "{}\n",
        "no unicode": "\udcff\udcfe\n",
        "60,000 [": "[" * 60_000 + "\n",
        "60,000 {": '{"a":' * 60_000 + "\n",
        "60,000 -": "- " * 60_000 + "\n",
        "5,000 [": "[" * 5_000 + "]" * 5_000 + "\n",
        "aliases": bomb,
        "a cycle": "a: &a [*a]\n",
        "a tag": "!!python/object/apply:os.system ['true']\n",
        "a large number": "1" * 10_000 + "\n",
        "infinity": '{"step": 1e999, "seed": 1e400, "steps": 1e999}\n',
        "control characters": '{"label": "\\u001b[2J\\nclip", "state": "\\u001b]0;x\\u0007"}\n',
    }
    name = chance.choice(list(contents))
    file.write_bytes(contents[name].encode(errors="surrogateescape"))
    return name


def _change_value(chance: Random, file: Path, _: Path) -> str:
    """Give a random key of the file's JSON another type, in one line."""
    lines = file.read_bytes().splitlines()
    if file.suffix not in (".json", ".jsonl") or not lines:
        return "no JSON"
    whole = file.suffix == ".json"
    place = chance.randrange(len(lines))
    try:
        row = json.loads(b"\n".join(lines) if whole else lines[place])
        key = chance.choice(list(row))
    except (ValueError, TypeError, IndexError, RecursionError):
        return "no mapping"
    values = [None, True, -1, 10**30, 1e300, "text", "", [], [[]], {}, {"a": {"b": 1}}]
    values += ["../private", "../../private", "/etc", "\u001b[31mred\nline", "<script>", 0.5]
    value = chance.choice(values)
    row[key] = value
    if whole:
        file.write_text(json.dumps(row), encoding="utf-8")
    else:
        lines[place] = json.dumps(row).encode()
        file.write_bytes(b"\n".join(lines) + b"\n")
    return f"{key}={value!r}"


def _insert(chance: Random, file: Path, _: Path) -> str:
    content = file.read_bytes()
    place = chance.randrange(len(content) + 1)
    more = chance.choice([b"\x00", b"\n", b"\n\n{}\n", b"\n[1]\n", b"\xff", b"nan", b"*a", b"}"])
    file.write_bytes(content[:place] + more + content[place:])
    return repr(more)


def _remove(chance: Random, file: Path, _: Path) -> str:
    file.unlink()
    if chance.random() < 0.3:
        file.mkdir()
        return "and a folder in its place"
    return ""


def _link_file(chance: Random, file: Path, private: Path) -> str:
    target = chance.choice([private / file.name, private / "new", Path("/dev/zero"), file])
    target = target if file.name != "summary.json" else private / file.name
    file.unlink()
    file.symlink_to(target)
    return f"to {target.name}"


def _link_folder(chance: Random, run: Path, private: Path) -> str:
    target = chance.choice([private, run.parent])
    report = run.parent / "report"
    folder = run if chance.random() < 0.5 or report.is_symlink() else report
    shutil.rmtree(folder)
    folder.symlink_to(target)
    return f"{folder.name} to {target.name}"


def _names(chance: Random, run: Path, _: Path) -> str:
    """Name a control that is not in the study."""
    file = run / "run.json"
    try:
        facts = json.loads(file.read_bytes())
        control = chance.choice(["../private", "..", ".", "", "/etc", "a/b", "\u001b[2J", 3, ["a"]])
        facts["control"] = control
        facts["controls"] = {"plain": control}
        file.write_text(json.dumps(facts), encoding="utf-8")
    except (ValueError, OSError, TypeError, RecursionError):
        return "no facts"
    return repr(control)


def _wide_row(chance: Random, run: Path, _: Path) -> str:
    name = chance.choice(["metrics.jsonl", "effects.jsonl", "conflicts.jsonl", "summary.json"])
    row = {"step": 5, **{f"train/{k}": 0.5 for k in range(20_000)}}
    with suppress(OSError):  # an earlier damage left a link or a folder there
        (run / name).write_text(json.dumps(row) + "\n", encoding="utf-8")
    return name
