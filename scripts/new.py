"""Begin a transform or an aggregator, and check one.

    python scripts/new.py transform soft_clip [--like momentum]
    python scripts/new.py --check soft_clip

The first copies a class, its yaml file and a row of its tests under a new name, updates the
generated files, and prints the remaining steps. It overwrites nothing. The second checks one
transform or aggregator, or a preset, in less than 20 seconds on an idle machine.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from keyword import iskeyword
from pathlib import Path
from string import Template
from time import monotonic

from gradsurg.experiment import catalogue
from gradsurg.plugins.registry import GROUPS

ROOT = Path(__file__).resolve().parents[1]
TODO = "TODO"  # marks what a new plug-in must still say of itself
ROW = re.compile(r'^    Row\(\s*"(\w+)"(?:.*\),\n|(?:.*\n)+?    \),\n)', re.M)  # of a test
TOP = "ROWS = (\n"
LAST_LINES = 12  # of the output of a failed check


@dataclass(frozen=True)
class Kind:
    """A kind of plug-in: the folder of its classes and tests, and the one that is copied.

    `tests` are files that `--check` runs, and `steps` belong to STEPS.
    """

    folder: str
    model: str
    tests: tuple[str, ...]
    steps: str

    def files(self, name: str) -> tuple[str, str, str]:
        """Return the paths of the class, the yaml file and the test rows, from the root."""
        code, yaml = f"gradsurg/{self.folder}/{name}.py", f"conf/{GROUPS[self.folder]}/{name}.yaml"
        return code, yaml, f"tests/{self.folder}/cases.py"


STEPS = """
$code | class  | your fields, formula, properties and docstring (see CONTRIBUTING.md)
$yaml | # | purpose in one line; '# Paper: ...', '# Also: other words'; every field
$cases |     Row("$name" | results computed by hand, a row for each branch of the formula
$more
docs/draw_gallery.py | ILLUSTRATED | only if the picture shows no effect or misleads: fields
CHANGELOG.md | ### Gone | a line above this heading, such as '- **Its name.** What it does.'
"""
"""The remaining steps of a contributor: file, begin of the line, instruction."""

TRANSFORM = Kind(
    "transforms",
    "gradient_reversal",
    tuple(f"tests/transforms/test_{name}.py" for name in ("rows", "rules", "properties")),
    """tests/transforms/test_properties.py | OTHERS | only if other values matter: instances
tests/transforms/table.py | DROP_NAN | only if a single NaN goes or moves: its name
tests/transforms/cases.py | SHAPES_OF | only if it refuses some shapes: the others
tests/core/test_messages.py | ERRORS | only if it refuses some shapes: the error
tests/hooks/test_batched_backward.py | DRAWS | only if it is random: its name
tests/transforms/test_oracles.py | def test_autoclip | only if it has state or group: a test
tests/sites/test_step_hooks.py | SCALING | only if it is `Scaling`: an instance
tests/sites/test_sharded_parameters.py | AT_STEP | only if you set `acts_on_shards`: an instance
tests/transforms/test_rows.py | def test_fields_that_cont | only if fields contradict: the message
tests/transforms/test_rules.py | FIXED_DRAWS | only if it draws once for all calls: its name""",
)
AGGREGATOR = Kind(
    "aggregators",
    "sum",
    ("tests/aggregators/test_hand_computed.py", "tests/aggregators/test_gramian.py"),
    """tests/aggregators/test_gramian.py | def expected_of_same | only if equal rows g give no g
tests/aggregators/test_gramian.py | def test_opposite_tasks | only if g and -g do not give 0""",
)
KINDS = {GROUPS[kind.folder]: kind for kind in (TRANSFORM, AGGREGATOR)}


def main(words: list[str], root: Path = ROOT) -> int:
    """Run one command and return its exit code: 2 for a name that is refused, with one line."""
    usage = f"new.py {{{','.join(KINDS)}}} NAME [--like NAME], or --check NAME"
    parser = argparse.ArgumentParser(usage=usage)
    parser.add_argument("words", nargs="*")
    for option in ("--like", "--check"):
        parser.add_argument(option, metavar="NAME")
    asked = parser.parse_args(words)
    try:
        if asked.check and not (asked.words or asked.like):
            return check(known(asked.check, root), asked.check, CHECKS)
        if asked.check or len(asked.words) != 2 or asked.words[0] not in KINDS:
            raise ValueError(usage)
        kind, name = KINDS[asked.words[0]], asked.words[1]
        steps = begin(kind, name, asked.like or kind.model, root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if root == ROOT:
        check(kind, name, GENERATED)
    print(*steps, sep="\n")
    return 0


def known(name: str, root: Path) -> Kind:
    """Return the kind of an existing plug-in. Raises ValueError for another name."""
    for group, kind in KINDS.items():
        if name != "none" and (root / f"conf/{group}/{name}.yaml").exists():
            return kind
    raise ValueError(f"there is no conf/{' or conf/'.join(KINDS)} with a {name}.yaml")


def begin(kind: Kind, name: str, model: str, root: Path) -> list[str]:
    """Write the class, the yaml file and the test row, and return the remaining steps.

    Raises ValueError, before anything is written, for a name that is malformed or taken, and for a
    `model` that cannot be copied.
    """
    check_name(kind, name, root)
    code, yaml, cases = kind.files(name)
    for path in kind.files(model)[:2]:
        if not (root / path).exists():
            raise ValueError(f"'{model}' cannot be copied: there is no {path}")
    text, config = ((root / path).read_text(encoding="utf-8") for path in kind.files(model)[:2])
    texts = {cases: with_row(root / cases, model, name), code: new_class(text, model, name)}
    for path, text in (texts | {yaml: new_yaml(config, model, name)}).items():
        (root / path).write_text(text, encoding="utf-8")
    words = {"code": code, "yaml": yaml, "cases": cases, "name": name, "more": kind.steps}
    steps = [line.split(" | ") for line in Template(STEPS).substitute(words).strip().splitlines()]
    places = [f"{path}:{line_of(root / path, text)}  {say}" for path, text, say in steps]
    places.append(f"python scripts/new.py --check {name}  until all is ok; then scripts/check")
    return [f"{number}. {place}" for number, place in enumerate(places, 1)]


def check_name(kind: Kind, name: str, root: Path) -> None:
    """Raise ValueError for a name that a new file and class cannot have."""
    if not re.fullmatch(r"(?!.{41})[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or iskeyword(name):
        raise ValueError(f"'{name}' must be an identifier in snake_case, at most 40 letters long")
    paths = [*(root / "gradsurg" / kind.folder).glob("[!_]*.py")]
    paths += [path for group in GROUPS.values() for path in root.glob(f"conf/{group}/*.yaml")]
    stub = (root / "gradsurg/__init__.pyi").read_text(encoding="utf-8")
    taken = {word.lower(): f"gradsurg.{word}" for word in re.findall(r" as (\w+)$", stub, re.M)}
    taken |= {path.stem.replace("_", ""): str(path.relative_to(root)) for path in paths}
    if found := taken.get(name.replace("_", "")):
        raise ValueError(f"'{name}' is taken: there is {found}")


def new_class(text: str, model: str, name: str) -> str:
    """Return the file of a class under a new name, with `TODO` for its docstrings."""
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    classes = {one.name.lower(): one for one in tree.body if isinstance(one, ast.ClassDef)}
    old = classes[model.replace("_", "")]
    says = f'    """{TODO}: formula, paper, shapes; zero, NaN, infinities, an empty tensor."""\n'
    for body, said in ((old.body, says), (tree.body, f'"""{old.name}: {TODO}."""\n')):
        lines[body[0].lineno - 1 : body[0].end_lineno] = [said]
    return re.sub(rf"\b{old.name}\b", class_of(name), "".join(lines))


def new_yaml(text: str, model: str, name: str) -> str:
    """Return a yaml file with the name of another, and `TODO` for its purpose."""
    text = re.sub(r"^# (?!python -m).*\n", "", text, flags=re.M)
    text = re.sub(r"\A(# python .*\n)", f"\\1# {TODO}: its purpose, in one sentence.\n", text)
    target = rf"(?<=_target_: gradsurg\.){model.replace('_', '')}\b"
    return renamed(re.sub(target, class_of(name), text, flags=re.I), model, name)


def renamed(text: str, old: str, new: str) -> str:
    """Return a text of yaml or of a row with another name; as a word of a sentence it stays."""
    return re.sub(rf"(?<![ \w]){old}\b", new, text)


def class_of(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def with_row(path: Path, old: str, new: str) -> str:
    """Return the text of a file of test rows with a copy of the first row of another name."""
    text = path.read_text(encoding="utf-8")
    rows = [*ROW.finditer(text)]
    copied = [renamed(row[0], old, new) for row in rows if row[1] == old]
    if not copied:
        raise ValueError(f"'{old}' cannot be copied: no line of {path.name} begins a row of it")
    ends = {"": text.index(TOP) + len(TOP)} | {row[1]: row.end() for row in rows if row[1] < new}
    return text[: ends[max(ends)]] + copied[0] + text[ends[max(ends)] :]


def line_of(path: Path, text: str) -> int:
    """Return the number of the first line that begins with a text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.startswith(text))


def check(kind: Kind, name: str, checks: "dict[str, Check]") -> int:
    """Run checks and print a line for each, and the last lines of a failure; return the exit code.

    The generated files that are not up to date are written.
    """
    code = 0
    for label, run in checks.items():
        start = monotonic()
        try:
            mark, said = "ok  ", run(kind, name)
        except Exception as error:  # the code under test may raise anything
            mark, code, said = "FAIL", 1, last_lines(error)
        print(f"{mark} {label:<8} {monotonic() - start:4.1f} s  {said}", flush=True)
    return code


def last_lines(error: Exception) -> str:
    """Return the text of an error, of which the first line fits the line of a check."""
    text = str(error) if isinstance(error, AssertionError) else repr(error)
    first, *rest = text.strip().splitlines() or [repr(error)]
    return "\n     ".join([first, *rest[-LAST_LINES:]])


def style(kind: Kind, name: str) -> str:
    """Check by ruff the class, the rows and all changed Python files, and that no TODO is left."""
    own = [path for path in kind.files(name) if (ROOT / path).exists()]
    for path in own:
        assert TODO not in (ROOT / path).read_text(encoding="utf-8"), f"{path} has a {TODO} left"
    changes = ran(["git", "status", "--porcelain", "--no-renames", "-uall", "--", "*.py"]).stdout
    others = [line[3:] for line in changes.splitlines() if (ROOT / line[3:]).exists()]
    paths = [path for path in dict.fromkeys([*own, *others]) if path.endswith(".py")]
    for words in (["check", "--quiet", "--output-format=concise"], ["format", "-q", "--check"]):
        done = ran([sys.executable, "-m", "ruff", *words, *paths])
        assert not done.returncode, f"ruff {words[0]}\n{done.stdout}{done.stderr}"
    return ", ".join(paths)


ran = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)


def lists(kind: Kind, name: str) -> str:
    """Write the stub, the catalogue and the text of the gallery if they are out of date."""
    import stub

    return changed(*stub.write())


def changed(*paths: Path) -> str:
    return f"wrote {', '.join(str(path.relative_to(ROOT)) for path in paths)}" * bool(paths) or "ok"


def properties(kind: Kind, name: str) -> str:
    """Check the declared properties, and write the row of the README if it is out of date."""
    from tests.verdict_tables import insert, written

    table = import_module(f"tests.{kind.folder}.table")
    row = table.row(name)  # raises AssertionError for a false declaration
    cells = zip(written(table.README)[0].split("|"), row.split("|"), strict=False)
    found = [head.strip() for head, cell in cells if cell.strip() == "(yes)"]
    said = "those declared hold" + f"; not declared: {', '.join(found)}" * bool(found)
    if kind is AGGREGATOR and not (ROOT / kind.files(name)[0]).exists():
        return said
    stems = sorted(one.name for one in catalogue.list(GROUPS[kind.folder]))
    return changed(*[table.README] * insert(table.README, row, stems)) + f", {said}"


def entry_of(kind: Kind, name: str) -> catalogue.Entry:
    return next(one for one in catalogue.list(GROUPS[kind.folder]) if one.name == name)


def picture(kind: Kind, name: str) -> str:
    """Draw the picture of the gallery if it is not up to date, and check that it has an effect."""
    from docs import draw_gallery as gallery

    entry = entry_of(kind, name)
    written = [] if gallery.is_up_to_date(entry) else [gallery.store(entry)]
    assert gallery.shows_effect(entry), gallery.NO_EFFECT
    return changed(*written)


def tests(kind: Kind, name: str) -> str:
    """Run the tests of this name or class, and those that compare the lists of names."""
    import pytest

    from tests.naming import functions_that_name

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # one of hydra must precede hydra
    cls = entry_of(kind, name).fields["_target_"].rpartition(".")[2]
    others = functions_that_name(cls, ROOT / "tests" / kind.folder)
    named = (f"[{name}]", f"[{name}-", f"-{name}-", f"-{name}]")
    chosen = " or ".join([*named, cls, "every_config_has_a_row", "its_class_and", *others])
    marks = "one_in or not slow and not full"
    files = (*kind.tests, "tests/experiment/test_completeness.py", *others.values())
    paths = dict.fromkeys(str(ROOT / file) for file in files)
    with redirect_stdout(StringIO()) as out:  # in this process, which has imported torch
        code = pytest.main([f"--rootdir={ROOT}", "-k", chosen, "-m", marks, *paths])
    assert not code, out.getvalue()
    return out.getvalue().strip().splitlines()[-1]


Check = Callable[[Kind, str], str]
GENERATED: dict[str, Check] = {"lists": lists, "row": properties, "picture": picture}
CHECKS: dict[str, Check] = {"ruff": style, **GENERATED, "tests": tests}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # tests/
    sys.exit(main(sys.argv[1:]))
