"""The catalogue: every option of each config group, with its purpose, properties and paper.

The first comments of `conf/<group>/<name>.yaml` are its command, its purpose and its paper:

    # python -m gradsurg.run transform=clip transform.clip.value=0.01
    # Bound the magnitude of every entry.
    # Paper: Graves 2013, arXiv 1308.0850

`scripts/stub.py` writes all entries to `catalogue.json`, so that listing imports no torch.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, get_args

from gradsurg.effects.tables import aligned
from gradsurg.plugins.messages import folded, nearest, terminal_width
from gradsurg.plugins.registry import find, names

FILE = Path(__file__).with_suffix(".json")
FOLDERS = {"transform": "transforms", "site": "sites", "when": "triggers"}
FOLDERS |= {"aggregator": "aggregators", "model": "models", "task": "tasks", "logger": "loggers"}
"""Config group: folder of its classes. The others name classes of PyTorch."""
TORCH_MODULES = {"optimizer": "torch.optim", "schedule": "torch.optim.lr_scheduler"}
LISTED = (*FOLDERS, *TORCH_MODULES, "experiment")
ALIASES = {"trigger": "when", "recipe": "experiment"}
ARXIV = "https://arxiv.org/abs/"
NO_LIMIT = 1 << 16  # more columns than any table has


@dataclass(frozen=True)
class Entry:
    """One option of a config group, `group=name` on the command line.

    `target` is its class, `preset_of` the option of the same class named like the class if this is
    another one, `paper` a citation and `url` its page, `fields` the content of the yaml file. A
    transform `needs` inputs besides the gradient; it or a kind of site acts at `stages`.
    """

    group: str
    name: str
    summary: str
    target: str
    preset_of: str
    paper: str
    url: str
    command: str
    fields: dict[str, Any]  # Any: what a yaml file can hold
    properties: Sequence[str] = ()
    needs: Sequence[str] = ()
    stages: Sequence[str] = ()


class Catalogue(tuple[Entry, ...]):
    """Entries that print as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return self.table(get_terminal_size().columns)

    def table(self, width: int | None = None) -> str:
        """Format the entries as a table of at most `width` columns, by default those of COLUMNS or
        of the terminal; in a pipe without COLUMNS an entry has one line.
        """
        columns = width or terminal_width(sys.stdout) or NO_LIMIT
        groups = dict.fromkeys(entry.group for entry in self)
        parts = [_table([one for one in self if one.group == group], columns) for group in groups]
        return "\n\n".join(parts)

    def overview(self) -> str:
        """Format the number of entries of each group, and the command that lists them."""
        counts = Counter(entry.group for entry in self).items()
        lines = [f"python -m gradsurg.run --list {key:<12} {n:>3} options" for key, n in counts]
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
    return Catalogue(Entry(**row) for row in rows if wanted in ("", row["group"]))


def measured() -> Catalogue:
    """Return the entries of all groups from the yaml files and the classes; imports torch."""
    from gradsurg.experiment.compose import CONFIG_DIR

    return Catalogue(
        _entry(group, path)
        for group in LISTED
        for path in sorted((CONFIG_DIR / group).glob("*.yaml"))
        if path.stem != "none"
    )


def _entry(group: str, path: Path) -> Entry:
    """Return the entry of a yaml file."""
    import yaml

    from gradsurg.experiment.compose import LISTS

    text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
    command, summary, third = (line.removeprefix("# ") for line in text.split("\n")[:3])
    paper, _, number = third.partition("Paper: ")[2].partition(", arXiv ")
    config = yaml.safe_load(text)
    fields = config[path.stem] if group in LISTS else config
    name = str(fields.get("name", ""))
    target, preset_of = f"{TORCH_MODULES.get(group)}.{name}" if name[:1].isupper() else "", ""
    facts: dict[str, Sequence[str]] = {}
    if group in FOLDERS:
        cls = find(FOLDERS[group], name)
        target, preset_of = f"{cls.__module__}.{cls.__name__}", name if name != path.stem else ""
        facts = _facts(group, fields, cls)
    summary, url = summary.removesuffix("."), ARXIV + number if number else ""
    return Entry(group, path.stem, summary, target, preset_of, paper, url, command, fields, **facts)


def _facts(group: str, fields: dict[str, Any], cls: type) -> dict[str, Sequence[str]]:
    """Return the properties, needs and stages of the object that a yaml file describes."""
    from gradsurg.aggregators.base import Aggregator
    from gradsurg.experiment.instantiate import instantiate
    from gradsurg.transforms.base import Transform

    match group:
        case "transform":
            made: Any = instantiate("transforms", fields, Transform)
            facts = {"needs": sorted(made.needs), "stages": _stages_of(made)}
            return {"properties": sorted(made.properties), **facts}
        case "aggregator":
            return {"properties": sorted(instantiate("aggregators", fields, Aggregator).properties)}
        case _:
            return {"stages": _stages_of_kind(cls)}


def _stages_of_kind(cls: Any) -> Sequence[str]:  # Any: a class of plug-ins
    """Return the stages that a kind of site can have, the default first."""
    return [*dict.fromkeys(getattr(cls, "stages", ()) + getattr(cls, "group_stages", ()))]


def _stages_of(transform: Any) -> Sequence[str]:  # Any: a transform
    """Return the stages at which some kind of site accepts a transform, in their order."""
    from gradsurg.core.intervention import Intervention
    from gradsurg.sites.base import Stage
    from gradsurg.sites.nodes import Nodes

    kinds: Any = [find("sites", name) for name in names("sites")]
    selectors = [kind(pattern="*", stage=name) for kind in kinds for name in _stages_of_kind(kind)]
    selectors.append(Nodes("Addmm", side="leave", edge=1))  # has all inputs that transforms need
    accepted = set()
    for selector in selectors:
        with suppress(ValueError):
            Intervention(transform, selector)
            accepted.add(selector.resolve(transform.scope))
    return [stage for stage in get_args(Stage) if stage in accepted]


def _table(entries: Sequence[Entry], width: int) -> str:
    """Format the entries of one group, with a legend."""
    letters: dict[str, str] = {}
    for key in sorted({key for entry in entries for key in entry.properties}):
        letters[key] = key[0].upper() if key[0] in letters.values() else key[0]
    stages = [*dict.fromkeys(stage for entry in entries for stage in entry.stages)]
    rows = [[entries[0].group, *["properties"] * bool(letters), "purpose"]]
    for entry in entries:
        marks = (letters[key] if key in entry.properties else "." for key in letters)
        rows.append([entry.name, *["".join(marks)] * bool(letters), _purpose(entry, stages)])
    legend = [", ".join(f"{letter} {key.replace('_', ' ')}" for key, letter in letters.items())]
    if any(entry.preset_of for entry in entries):
        legend.append("(name): a preset of that one, with other fields")
    if stages:
        legend.append(f"[..]: the stages at which it acts, if not all: {', '.join(stages)}")
    lines = [folded(text, width) for text in legend if text]
    return "\n".join([aligned(rows, len(rows[0]), width), *[""] * bool(lines), *lines])


def _purpose(entry: Entry, all_stages: Sequence[str]) -> str:
    """Return the summary, with the option that it is a preset of, some stages, and the paper."""
    text = f"{entry.summary} ({entry.preset_of})" if entry.preset_of else entry.summary
    missing = [stage for stage in all_stages if stage not in entry.stages]
    if entry.stages and missing:
        few = entry.stages if len(entry.stages) <= len(missing) else missing
        text += f" [{'not ' if few is missing else ''}{', '.join(few)}]"
    number = f", arXiv {entry.url.removeprefix(ARXIV)}" if entry.url else ""
    return f"{text}. {entry.paper}{number}" if entry.paper else text
