"""The catalogue: every option of each config group, with its purpose, properties and paper.

`catalogue.json` beside this file is written by `scripts/stub.py`, so that listing imports no torch.
"""

import inspect
import json
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsurg.plugins.messages import nearest
from gradsurg.plugins.registry import find, names

if TYPE_CHECKING:
    from gradsurg.transforms.base import Transform

FILE = Path(__file__).with_suffix(".json")
FOLDERS = {
    "transform": "transforms",
    "site": "sites",
    "when": "triggers",
    "aggregator": "aggregators",
    "model": "models",
    "task": "tasks",
    "logger": "loggers",
}
"""Config group: folder of its classes. The others name classes of PyTorch."""
TORCH_MODULES = {"optimizer": "optim", "schedule": "optim.lr_scheduler"}
TUPLES = ("properties", "needs", "stages")
LISTED = (*FOLDERS, *TORCH_MODULES, "experiment")
KEYED = ("transform", "logger")
"""The groups whose options have their fields under their name."""
ALIASES = {"trigger": "when", "recipe": "experiment"}

NAME = r"[A-Z][\w-]+"
PAPER = rf"({NAME}(?:(?:, {NAME})*(?: and {NAME})?| et al\.),? (?:{NAME} ){{0,2}}(?:19|20)\d\d)"
"""Authors, a venue and a year, as the docstrings have them."""

LETTERS = {
    "elementwise": "e",
    "homogeneous": "h",
    "idempotent": "i",
    "linear": "l",
    "odd": "o",
    "sign_preserving": "s",
    "norm_non_increasing": "n",
    "unbiased": "u",
    "deterministic": "d",
    "non_conflicting": "c",
    "permutation_invariant": "p",
    "linear_under_scaling": "L",
    "scale_invariant": "s",
    "strongly_stationary": "t",
}
"""The letter of each property in the printed table, for transforms and for aggregators."""
MIN_WIDTH, WIDE, MAX_WIDTH = 60, 120, 160


@dataclass(frozen=True)
class Entry:
    """One option of a config group, `group=name` on the command line.

    `target` is its class, `preset_of` the option of the same class named like the class if this is
    another one, `needs` the inputs that a transform requires besides the gradient, and `stages` the
    stages at which a transform or a kind of site can act. `paper` is a citation, `url` its page.
    """

    group: str
    name: str
    summary: str
    target: str
    preset_of: str
    properties: tuple[str, ...]
    needs: tuple[str, ...]
    stages: tuple[str, ...]
    paper: str
    url: str
    command: str


class Catalogue(tuple[Entry, ...]):
    """Entries that print as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return self.table()

    def table(self, width: int | None = None) -> str:
        """Format the entries as a table of at most `width` columns, those of the terminal if None.

        Above 120 columns papers have authors and year, below their arXiv number.
        """
        columns = shutil.get_terminal_size().columns if width is None else width
        columns = min(max(columns, MIN_WIDTH), MAX_WIDTH)
        groups = dict.fromkeys(entry.group for entry in self)
        parts = [_table([one for one in self if one.group == group], columns) for group in groups]
        return "\n\n".join(parts)

    def overview(self) -> str:
        """Format the number of entries of each group, and the command that lists them."""
        counts = Counter(entry.group for entry in self)
        lines = [
            f"python -m gradsurg.run --list {group:<12} {counts[group]:>3} options"
            for group in counts
        ]
        return "\n".join([*lines, "With --json: all fields, as JSON."])

    def json(self) -> str:
        """Format the entries as JSON, one object a line."""
        lines = ",\n".join(json.dumps(asdict(entry), ensure_ascii=False) for entry in self)
        return f"[\n{lines}\n]\n"


def list(group: str = "") -> Catalogue:
    """Return the entries of a config group, as `transform`; of all groups without an argument.

    Options are those of gradsurg itself. Raises LookupError for another group.
    """
    wanted = ALIASES.get(group, group)
    if wanted and wanted not in LISTED:
        raise LookupError(f"there is no group '{group}' to list. {nearest(group, [*LISTED])}")
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    entries = (Entry(**{**row, **{key: tuple(row[key]) for key in TUPLES}}) for row in rows)
    return Catalogue(entry for entry in entries if wanted in ("", entry.group))


def measured() -> Catalogue:
    """Return the entries of all groups from the classes and the yaml files; imports torch."""
    from gradsurg.experiment.compose import CONFIG_DIR

    return Catalogue(
        _entry(group, path)
        for group in LISTED
        for path in sorted((CONFIG_DIR / group).glob("*.yaml"))
        if path.stem != "none"
    )


def paper(text: str) -> tuple[str, str]:
    """Return the first citation in a text, preferably one with an arXiv number, and its address."""
    text = " ".join(text.split())
    match = re.search(rf"{PAPER}(?: \(|, )arXiv ([\d.]*\d)", text) or re.search(rf"{PAPER}()", text)
    if not match:
        return "", ""
    cited, number = match.groups()
    return cited, f"https://arxiv.org/abs/{number}" if number else ""


def _entry(group: str, path: Path) -> Entry:
    """Return the entry of a yaml file: its second comment line describes a preset."""
    import yaml

    text = path.read_text(encoding="utf-8")
    config: Any = yaml.safe_load(text)
    comments = re.findall(r"^# (?!@package)(.*)", text.partition("\n\n")[0], re.MULTILINE)
    fields_of_option = config[path.stem] if group in KEYED else config
    name = str(fields_of_option.get("name", ""))
    if group == "experiment":
        summary, _, source = " ".join(comments[1:]).partition(". ")
        return _made(group, path.stem, summary, "", source, comments[0])
    if group in TORCH_MODULES:
        target = f"torch.{TORCH_MODULES[group]}.{name}" if name[0].isupper() else ""
        return _made(group, path.stem, " ".join(comments[1:]) or target, target, "", comments[0])
    cls = find(FOLDERS[group], name)
    source = inspect.getdoc(cls) or ""
    module = import_module(f"gradsurg.{FOLDERS[group]}.{name}")
    summary = (module.__doc__ or "").partition("\n")[0]
    summary = (summary.partition(": ")[2] or summary).partition(". ")[0]
    preset_of = "" if path.stem == name else name
    if preset_of:
        source = " ".join(comments[1:])
        summary = re.split(rf"\. {PAPER}", source)[0] or _changes(fields_of_option, path, group)
    made = _made(group, path.stem, summary, f"{cls.__module__}.{cls.__name__}", source, comments[0])
    measured_fields = {"preset_of": preset_of, **_measured(group, fields_of_option, cls)}
    return Entry(**{**asdict(made), **measured_fields})


def _changes(config: Any, path: Path, group: str) -> str:
    """Return the fields in which a preset without a description differs from its class's option."""
    import yaml

    text = path.with_stem(config["name"]).read_text(encoding="utf-8")
    default = yaml.safe_load(text)
    default = default[config["name"]] if group in KEYED else default
    changed = (f"{key}={value}" for key, value in config.items() if value != default.get(key))
    return f"with {', '.join(changed)}"


def _made(group: str, name: str, summary: str, target: str, source: str, command: str) -> Entry:
    cited, url = paper(source)
    summary = summary.strip().removesuffix(".")
    if not target.startswith("torch."):
        summary = summary[:1].upper() + summary[1:]
    return Entry(group, name, summary, target, "", (), (), (), cited, url, command)


def _measured(group: str, config: Any, cls: type) -> dict[str, tuple[str, ...]]:
    """Return the properties, needs and stages of the object that a yaml file describes."""
    from gradsurg.aggregators.base import Aggregator
    from gradsurg.experiment.instantiate import instantiate
    from gradsurg.transforms.base import Transform

    match group:
        case "transform":
            transform = instantiate("transforms", config, Transform)
            return {
                "properties": tuple(key for key in LETTERS if key in transform.properties),
                "needs": tuple(sorted(transform.needs)),
                "stages": tuple(_stages_of(transform)),
            }
        case "aggregator":
            aggregator = instantiate("aggregators", config, Aggregator)
            return {"properties": tuple(key for key in LETTERS if key in aggregator.properties)}
        case "site":
            stages = (*getattr(cls, "stages", ()), *getattr(cls, "group_stages", ()))
            return {"stages": tuple(dict.fromkeys(stages))}
        case _:
            return {}


def _stages_of(transform: "Transform") -> Iterator[str]:
    """Yield the stages at which some kind of site accepts a transform, in their order."""
    from typing import get_args

    from gradsurg.sites.base import Stage

    accepted = {kind.resolve(transform.scope) for kind in _sites() if _accepts(kind, transform)}
    yield from (stage for stage in get_args(Stage) if stage in accepted)


def _accepts(selector: Any, transform: "Transform") -> bool:  # Any: a selector
    from gradsurg.core.intervention import Intervention

    try:
        Intervention(transform, selector)
    except ValueError:
        return False
    return True


def _sites() -> Iterator[Any]:  # Any: a selector
    """Yield a selector for each kind of site, stage and input that transforms can need."""
    for name in names("sites"):
        cls: Any = find("sites", name)
        match name:
            case "combined":
                continue  # has the stages of its parts
            case "nodes":
                yield cls("*")
                yield cls("*", side="leave")
                yield cls("Addmm", side="leave", edge=1)
            case "uses":
                yield cls("*")
            case _:
                for stage in dict.fromkeys((*cls.stages, *cls.group_stages)):
                    if name != "every_module" or stage == "forward":
                        yield cls(stage=stage)


def _table(entries: Sequence[Entry], width: int) -> str:
    """Format the entries of one group, with a legend."""
    group = entries[0].group
    letters = [key for key in LETTERS if any(key in entry.properties for entry in entries)]
    has_papers = any(entry.paper for entry in entries)
    all_stages = max((entry.stages for entry in entries), key=len)
    rows = [[group, "purpose", *["properties"] * bool(letters), *["paper"] * has_papers]]
    for entry in entries:
        row = [entry.name, _purpose(entry, all_stages)]
        if letters:
            row.append("".join(LETTERS[key] if key in entry.properties else "." for key in letters))
        if has_papers:
            number = entry.url.removeprefix("https://arxiv.org/abs/")
            short = number or entry.paper[-4:]  # the year
            row.append(f"{entry.paper} {number}".strip() if width >= WIDE else short)
        rows.append(row)
    legend = []
    if letters:
        legend.append(", ".join(f"{LETTERS[key]} {key.replace('_', ' ')}" for key in letters))
    if any(entry.preset_of for entry in entries):
        legend.append("(name): a preset of that one, with other fields")
    if group == "transform":
        legend.append(f"[..]: the stages at which it acts, if not all: {', '.join(all_stages)}")
    elif group == "site":
        legend.append("[..]: its stages, the default first")
    wrapped = [line for text in legend for line in textwrap.wrap(text, width)]
    return "\n".join([_aligned(rows, width), *[""] * bool(legend), *wrapped])


def _purpose(entry: Entry, all_stages: Sequence[str]) -> str:
    """Return the summary, with the option that it is a preset of and the stages if not all."""
    text = f"{entry.summary} ({entry.preset_of})" if entry.preset_of else entry.summary
    if entry.group == "site" and entry.stages:
        return f"{text} [{', '.join(entry.stages)}]"
    missing = [stage for stage in all_stages if stage not in entry.stages]
    if not missing or not entry.stages:
        return text
    if len(missing) < len(entry.stages):
        return f"{text} [not {', '.join(missing)}]"
    return f"{text} [{', '.join(entry.stages)}]"


def _aligned(rows: Sequence[Sequence[str]], width: int) -> str:
    """Format a table, with a rule below its head and its second column wrapped."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sizes[1] = min(sizes[1], width - sum(sizes) + sizes[1] - 2 * (len(sizes) - 1))
    lines = []
    for row in rows:
        for number, piece in enumerate(textwrap.wrap(row[1], sizes[1]) or [""]):
            cells = [row[0], piece, *row[2:]] if number == 0 else ["", piece, *[""] * len(row[2:])]
            padded = (cell.ljust(size) for cell, size in zip(cells, sizes, strict=True))
            lines.append("  ".join(padded).rstrip())
        if len(lines) == 1:
            lines.append("-" * (sum(sizes) + 2 * (len(sizes) - 1)))
    return "\n".join(lines)
