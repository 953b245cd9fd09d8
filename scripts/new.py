"""Begin a transform or an aggregator, and check one.

    python scripts/new.py transform soft_clip
    python scripts/new.py --check soft_clip

The first command copies the class of a short plug-in, its yaml file and a row of its tests under a
new name. It updates the files that are generated from them, and prints the remaining steps. It
overwrites nothing. The second checks one transform or aggregator, or a preset of one, in less than
20 seconds on an idle machine; `scripts/check` runs all checks.
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
from importlib import import_module
from io import StringIO
from keyword import iskeyword
from pathlib import Path
from string import Template
from time import monotonic

from gradsurg.experiment import catalogue
from gradsurg.plugins.registry import GROUPS

ROOT = Path(__file__).resolve().parents[1]
MAX_LETTERS = 40  # of a name: a longer one does not fit the lines of the templates
TODO = "TODO"  # marks what a new plug-in must still say of itself
LAST_LINES = 12  # of the output of a failed check


@dataclass(frozen=True)
class Kind:
    """A kind of plug-in: the folder of its classes and tests, and the one that is copied.

    `tests` are the files that `--check` runs, and `steps` belong to STEPS.
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
docs/draw_gallery.py | ILLUSTRATED | only if the picture shows no effect: fields or OF_NAMES
CHANGELOG.md | ### New | a line at the end of this part, such as '- **Its name.** ...'
"""
"""The remaining steps of a contributor: file, begin of the line, instruction."""

TRANSFORM = Kind(
    "transforms",
    "gradient_reversal",
    ("tests/transforms/test_rows.py", "tests/transforms/test_rules.py"),
    """tests/transforms/test_properties.py | OTHERS | only if `tags_if` has conditions: instances
tests/transforms/table.py | DROP_NAN | only if a single NaN goes or moves: its name
tests/transforms/cases.py | SHAPES_OF | only if it refuses some shapes: the others
tests/core/test_messages.py | ERRORS | only if it refuses some shapes: the error
tests/hooks/test_batched_backward.py | DRAWS | only if it is random: its name
tests/transforms/test_oracles.py | def test_autoclip | only if it has a state: a test of later steps
tests/sites/test_step_hooks.py | SCALING | only if it is `Scaling` (tests `factors`): an instance
tests/sites/test_sharded_parameters.py | AT_STEP | only if you write `acts_on_shards`: an instance
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
COMPLETENESS = "tests/experiment/test_completeness.py"


def main(words: list[str], root: Path = ROOT) -> int:
    """Run one command and return its exit code: 2 for a name that is refused, with one line."""
    parser = argparse.ArgumentParser(usage=f"new.py {{{','.join(KINDS)}}} NAME, or --check NAME")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--check", metavar="NAME")
    asked = parser.parse_args(words)
    try:
        if asked.check and not asked.words:
            return check(known(asked.check, root), asked.check, CHECKS)
        if asked.check or len(asked.words) != 2 or asked.words[0] not in KINDS:
            raise ValueError(parser.usage)
        kind, name = KINDS[asked.words[0]], asked.words[1]
        steps = begin(kind, name, root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if root == ROOT:
        check(kind, name, GENERATED)
    parts = dict.fromkeys([*name.split("_"), name.replace("_", "")])
    lists = ", ".join(f"--list {asked.words[0]} {word}" for word in parts)
    print(f"Does it exist already? python -m gradsurg.run {lists}", *steps, sep="\n")
    return 0


def known(name: str, root: Path) -> Kind:
    """Return the kind of an existing plug-in. Raises ValueError for another name."""
    for group, kind in KINDS.items():
        if name != "none" and (root / f"conf/{group}/{name}.yaml").exists():
            return kind
    raise ValueError(f"there is no conf/{' or conf/'.join(KINDS)} with a {name}.yaml")


def begin(kind: Kind, name: str, root: Path) -> list[str]:
    """Write the class, the yaml file and the test row, and return the remaining steps.

    Raises ValueError, before anything is written, for a name that is malformed or taken.
    """
    check_name(kind, name, root)
    code, yaml, cases = kind.files(name)
    rows = with_row(root / cases, kind.model, name)
    for path, model in zip((code, yaml), kind.files(kind.model), strict=False):
        text = to_be_described((root / model).read_text(encoding="utf-8"))
        with (root / path).open("x", encoding="utf-8") as file:
            file.write(renamed(text, kind.model, name))
    (root / cases).write_text(rows, encoding="utf-8")
    words = {"code": code, "yaml": yaml, "cases": cases, "name": name, "more": kind.steps}
    steps = [line.split(" | ") for line in Template(STEPS).substitute(words).strip().splitlines()]
    places = [f"{path}:{line_of(root / path, text)}  {say}" for path, text, say in steps]
    places.append(f"python scripts/new.py --check {name}  until all is ok; then scripts/check")
    return [f"{number}. {place}" for number, place in enumerate(places, 1)]


def check_name(kind: Kind, name: str, root: Path) -> None:
    """Raise ValueError for a name that a new file and class cannot have."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or iskeyword(name):
        raise ValueError(f"'{name}' must be an identifier in snake_case, such as soft_clip")
    if len(name) > MAX_LETTERS:
        raise ValueError(f"'{name}' must have at most {MAX_LETTERS} letters")
    paths = [*(root / "gradsurg" / kind.folder).glob("[!_]*.py")]
    paths += [path for group in GROUPS.values() for path in root.glob(f"conf/{group}/*.yaml")]
    stub = (root / "gradsurg/__init__.pyi").read_text(encoding="utf-8")
    taken = {word.lower(): f"gradsurg.{word}" for word in re.findall(r" as (\w+)$", stub, re.M)}
    taken |= {path.stem.replace("_", ""): str(path.relative_to(root)) for path in paths}
    if found := taken.get(name.replace("_", "")):
        raise ValueError(f"'{name}' is taken: there is {found}")


def to_be_described(text: str) -> str:
    """Return a class or a yaml file with `TODO` for what it says of itself."""
    text = re.sub(r"^# (?!python -m).*\n", "", text, flags=re.M)
    text = re.sub(r"\A(# python .*\n)", f"\\1# {TODO}: its purpose on one line\n", text)
    text = re.sub(r'\A("""\w+: ).*"""', rf'\1{TODO}."""', text)
    says = f"{TODO}: formula, paper, shapes; zero, NaN, infinities, an empty tensor."
    return re.sub(r'^    """.*?"""$', f'    """{says}"""', text, count=1, flags=re.M | re.S)


def renamed(text: str, old: str, new: str) -> str:
    """Return a text with the name of another file and class."""
    text = re.sub(rf"(?<![ \w]){old}\b", new, text)  # as a word of a sentence it stays
    return re.sub(rf"\b{class_of(old)}\b", class_of(new), text)


def class_of(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def with_row(path: Path, old: str, new: str) -> str:
    """Return the text of a file of test rows with a copy of the first row of another name.

    It stands where the alphabet has it.
    """
    text = path.read_text(encoding="utf-8")
    ends, copied = {"": line_of(path, "ROWS = (")}, []
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Row" and node.args:
            name, end = ast.literal_eval(node.args[0]), node.end_lineno or 0
            ends[name] = end
            copied = copied or lines[node.lineno - 1 : end] * (name == old)
    line = ends[max(other for other in ends if other < new)]
    return "".join([*lines[:line], *(renamed(one, old, new) for one in copied), *lines[line:]])


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
    """Check the class and the test rows by ruff, and that the class and its yaml are described."""
    code, yaml, cases = kind.files(name)
    paths = [path for path in (code, cases) if (ROOT / path).exists()]
    for path in (yaml, *paths):
        assert TODO not in (ROOT / path).read_text(encoding="utf-8"), f"{path} has a {TODO} left"
    for words in (["check", "--quiet", "--output-format=concise"], ["format", "-q", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, *paths]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert not done.returncode, f"ruff {words[0]}\n{done.stdout}{done.stderr}"
    return ", ".join(paths)


def lists(kind: Kind, name: str) -> str:
    """Write the stub, the catalogue and the text of the gallery if they are out of date."""
    import stub

    return changed(*stub.write())


def changed(*paths: Path) -> str:
    """Return a text that names the files that were written."""
    return f"wrote {', '.join(str(path.relative_to(ROOT)) for path in paths)}" * bool(paths) or "ok"


def properties(kind: Kind, name: str) -> str:
    """Check the declared properties, and write the row of the README if it is out of date."""
    from tests.verdict_tables import write, written

    table = import_module(f"tests.{kind.folder}.table")
    row = table.row(name)  # raises AssertionError for a false declaration
    head, *old = written(table.README)
    if row in old or (kind is AGGREGATOR and not (ROOT / kind.files(name)[0]).exists()):
        return "those declared hold"
    rows = {line.split("|")[1].strip(" `").lower().replace("_", ""): line for line in (*old, row)}
    stems = sorted(path.stem for path in ROOT.glob(f"conf/{GROUPS[kind.folder]}/*.yaml"))
    order = [key for stem in stems if (key := stem.replace("_", "")) in rows]
    write(table.README, head, [rows[key] for key in order])
    return changed(table.README)


def picture(kind: Kind, name: str) -> str:
    """Draw the picture of the gallery if it is older than the class, its yaml or the gallery."""
    from docs import draw_gallery

    entry = next(one for one in catalogue.list(GROUPS[kind.folder]) if one.name == name)
    drawn = draw_gallery.picture(entry)
    sources = [ROOT / source for source in (*kind.files(name)[:2], "docs/draw_gallery.py")]
    newest = max(source.stat().st_mtime for source in sources if source.exists())
    if drawn.exists() and drawn.stat().st_mtime >= newest:
        return "ok"
    return changed(draw_gallery.store(entry))


def tests(kind: Kind, name: str) -> str:
    """Run the tests of this name, and those that compare the lists of names."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # one of hydra must precede hydra
    named = f"[{name}] or [{name}- or -{name}- or -{name}]"
    chosen = f"{named} or every_config_has_a_row or its_class_and"
    marks = "one_in or not slow and not full"
    paths = [str(ROOT / path) for path in (*kind.tests, COMPLETENESS)]
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
