"""The catalogue: every option of each config group, with its purpose, properties and paper.

The first comments of `conf/<group>/<name>.yaml` are its command, its purpose, its paper and other
words for it, by which it is found:

    # python -m gradsurg.run transform=clip transform.clip.value=0.01
    # Bound the magnitude of every entry.
    # Paper: Graves 2013, arXiv 1308.0850
    # Also: value clipping, clip_grad_value

`scripts/stub.py` writes all entries to `catalogue.json`, so that listing imports no torch.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, get_args

from gradsurg.effects.tables import aligned
from gradsurg.plugins.messages import folded, one_line, terminal_width, unknown
from gradsurg.plugins.registry import CONFIG_DIR, GROUPS, HYDRAS, find, name_of, names

FILE = Path(__file__).with_suffix(".json")
FOLDERS = {group: folder for folder, group in GROUPS.items()}
"""Config group: folder of its classes. The others name classes of PyTorch."""
TORCH_MODULES = {"optimizer": "torch.optim", "schedule": "torch.optim.lr_scheduler"}
LISTED = (*FOLDERS, *TORCH_MODULES, "experiment", "surgery")
ALIASES = {"trigger": "when", "recipe": "experiment"}
ALIASES |= {f"{group}s": group for group in LISTED} | {"triggers": "when", "recipes": "experiment"}
ALIASES |= {"multitask": "aggregator", "multi-task": "aggregator"}
ALIASES |= {"preset": "surgery", "presets": "surgery"}
NOTES = ("Paper: ", "Also: ")
"""The beginnings of the comments that may follow the purpose in a yaml file."""
ARXIV = "https://arxiv.org/abs/"
PIPE_WIDTH = 80
PART = 4  # letters from which a word is searched inside other words: `sam` must not find `same`


@dataclass(frozen=True)
class Entry:
    """One option of a config group, `group=name` on the command line.

    `target` is its class. `preset_of` is the option with the name of the class, if another one:
    `adaptive_clip` for `zclip`. `paper` is a citation and `url` its page, `fields` the content of
    the yaml file and `also` other words for it. A transform `needs` inputs besides the gradient; it
    or a kind of site acts at `stages`.
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
    also: Sequence[str] = ()
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
        of the terminal; 80 in a pipe without COLUMNS.

        Entries of one group have their properties and stages, others the name of their group.
        """
        return _table(self, width or terminal_width(sys.stdout) or PIPE_WIDTH)

    def overview(self) -> str:
        """Format the number of entries of each group, and the command that lists them."""
        counts = Counter(entry.group for entry in self).items()
        notes = {"surgery": ", for your own Hydra app"}
        lines = [
            f"python -m gradsurg.run --list {key:<12} {n:>3} options{notes.get(key, '')}"
            for key, n in counts
        ]
        by_words = "python -m gradsurg.run --list weight decay"
        lines.append(f"{by_words}     options described by these words")
        return "\n".join([*lines, "With --json: all fields, as JSON."])

    def json(self) -> str:
        """Format the entries as JSON, one object a line."""
        lines = ",\n".join(json.dumps(asdict(entry), ensure_ascii=False) for entry in self)
        return f"[\n{lines}\n]\n"


def list(group: str = "", *words: str, config_dirs: Sequence[Path] = ()) -> Catalogue:
    """Return the entries of a config group such as `transform`; without an argument, of all groups.

    With words, for example `list("transform", "sparse")` or `list("weight decay")`, return the
    entries that have all of these words in their name, other names, purpose, paper or fields, best
    match first. A word of four letters or more also matches inside longer words. Options are those
    of gradsurg itself and of the folders `config_dirs`. Raises LookupError if there is none, with
    the groups and similar names, and for a folder or a file in it that cannot be read.
    """
    asked = [part for word in (group, *words) for part in word.split()]
    entries = [Entry(**row) for row in json.loads(FILE.read_text(encoding="utf-8"))]
    for config_dir in config_dirs:
        if not os.path.isdir(config_dir):  # False for a name that is too long, too
            raise LookupError(f"there is no folder '{config_dir}'")
        entries += _of_folder(config_dir, is_own=True)
    wanted = ALIASES.get(asked[0], asked[0]) if asked else ""
    if not asked or wanted in LISTED:
        own = [one for one in entries if wanted in ("", one.group)]
        found = _found(own, asked[1:]) if asked[1:] else own
        if found:
            return Catalogue(found)
    if found := _found(entries, asked):
        return Catalogue(found)
    raise LookupError(_unknown(asked, entries))


def _found(entries: Sequence[Entry], words: Sequence[str]) -> Sequence[Entry]:
    """Return the entries with all words: the one of that name first, then those that have them in
    their names.
    """
    wanted, found = [_joined(word) for word in words], []
    for one in entries if all(wanted) else ():
        names = _words(one.name, *one.also)
        class_name = one.target.rpartition(".")[2]
        texts = one.summary, one.paper, one.preset_of, class_name, _shown(one)
        if all(_is_in([*names, *_words(*texts)], word) for word in wanted):
            is_named = all(_is_in(names, word) for word in wanted)
            found.append((2 - is_named - ("".join(wanted) == _joined(one.name)), one))
    return [one for _, one in sorted(found, key=itemgetter(0))]


def also_named(group: str, word: str) -> Sequence[str]:
    """Return the options of a group that are also known by a word such as `dropout`."""
    entries = list(group) if group in LISTED else ()
    return [one.name for one in entries if _joined(word) in map(_joined, one.also)]


def _joined(name: str) -> str:
    return re.sub(r"\W|_", "", name).lower()


def _words(*texts: str) -> Sequence[str]:
    """Return the words of texts; those of `top-k` are `topk`, `top` and `k`."""
    words = [word for text in texts for word in text.split()]
    parts = [part for word in words for part in re.split(r"\W|_", word)]
    return [_joined(word) for word in dict.fromkeys((*words, *parts))]


def _is_in(words: Sequence[str], word: str) -> bool:
    return word in words or (len(word) >= PART and any(word in each for each in words))


def _unknown(asked: Sequence[str], entries: Sequence[Entry]) -> str:
    """Return the message for words that describe no option, with similar names."""
    missing = [word for word in asked if not _found(entries, [word])]
    words = " or ".join(f"'{word}'" for word in missing)
    groups = [word for word in asked if word in (*LISTED, *ALIASES)]
    where = f"no {groups[0]} has the word" if groups else "there is no group or option"
    fault = f"{where} {words}" if words else "no option has all these words"
    known = [*LISTED, *ALIASES, *(name for one in entries for name in (one.name, *one.also))]
    close = [one for word in missing for one in get_close_matches(word.lower(), {*known}, 1, 0.7)]
    if close:
        return unknown(fault, "", close, close)
    return f"{fault}." if groups else f"{fault}. The groups are: {', '.join(LISTED)}."


def measured() -> Catalogue:
    """Return the entries of all groups from the yaml files and the classes; imports torch."""
    return Catalogue(_of_folder(CONFIG_DIR, is_own=False))


def _of_folder(config_dir: Path, is_own: bool) -> Iterator[Entry]:
    """Yield the entries of a folder of configs; of a user's own from the yaml files alone."""
    for group in LISTED:
        for path in sorted((config_dir / group).glob("*.yaml")):
            if path.stem != "none":
                yield _entry(group, path, is_own)


def _entry(group: str, path: Path, is_own: bool) -> Entry:
    """Return the entry of a yaml file; the properties and stages only of gradsurg's own."""
    import yaml

    from gradsurg.experiment.compose import LISTS

    text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
    comments = takewhile(lambda line: line.startswith("#"), text.splitlines())
    head = [line.removeprefix("# ") for line in comments]
    notes = dict(line.split(": ", 1) for line in head if line.startswith(NOTES))
    command, summary, *_ = *(line for line in head if not line.startswith(NOTES)), "", ""
    paper, _, number = notes.get("Paper", "").partition(", arXiv ")
    try:
        config = yaml.safe_load(text) or {}
        fields = config.get(path.stem) or {} if group in LISTS else config
    except (yaml.YAMLError, AttributeError) as error:
        raise LookupError(f"{path} is no config: {one_line(error)}") from error
    target, name = str(fields.get("_target_", "")), name_of(fields)
    preset_of = "" if group not in FOLDERS or name in (path.stem, target) else name
    facts: dict[str, Sequence[str]] = {}
    if group in FOLDERS and not is_own:
        cls = find(FOLDERS[group], name)
        target, facts = f"{cls.__module__}.{cls.__name__}", _facts(group, fields, cls)
    summary, url = summary.removesuffix("."), ARXIV + number if number else ""
    also = [word for word in notes.get("Also", "").split(", ") if word]
    return Entry(
        group, path.stem, summary, target, preset_of, paper, url, command, fields, also, **facts
    )


def _facts(group: str, fields: dict[str, Any], cls: type) -> dict[str, Sequence[str]]:
    """Return the properties, needs and stages of the object that a yaml file describes."""
    from gradsurg.aggregators.base import Aggregator
    from gradsurg.experiment.making import make
    from gradsurg.transforms.base import Transform

    match group:
        case "transform":
            made: Any = make(fields, Transform)
            facts = {"needs": sorted(made.needs), "stages": _stages_of(made)}
            return {"properties": sorted(made.properties), **facts}
        case "aggregator":
            return {"properties": sorted(make(fields, Aggregator).properties)}
        case _:
            return {"stages": _stages_of_kind(cls)}


def _stages_of_kind(cls: Any) -> Sequence[str]:  # Any: a class of plug-ins
    """Return the stages that a kind of site can have, the default first."""
    return [*dict.fromkeys(getattr(cls, "stages", ()) + getattr(cls, "group_stages", ()))]


def _stages_of(transform: Any) -> Sequence[str]:  # Any: a transform
    """Return the stages at which some kind of site accepts a transform, in their order."""
    from gradsurg.core.intervention import Intervention
    from gradsurg.sites.nodes import Nodes
    from gradsurg.sites.places import Stage

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
    """Format entries with a legend."""
    of_one_group = entries if len({entry.group for entry in entries}) == 1 else []
    letters: dict[str, str] = {}
    for key in sorted({key for entry in of_one_group for key in entry.properties}):
        letters[key] = key[0].upper() if key[0] in letters.values() else key[0]
    stages = [*dict.fromkeys(stage for entry in of_one_group for stage in entry.stages)]
    group = entries[0].group if of_one_group else "option"
    rows = [[group, *["properties"] * bool(letters), "purpose"]]
    for entry in entries:
        name = entry.name if of_one_group else f"{entry.group}={entry.name}"
        marks = (letters[key] if key in entry.properties else "." for key in letters)
        rows.append([name, *["".join(marks)] * bool(letters), _purpose(entry, stages)])
    named = ", ".join(f"{letter} {key.replace('_', ' ')}" for key, letter in letters.items())
    legend = [f"Properties (gradsurg/{group}s/README.md): {named}"] if letters else []
    if any(entry.preset_of for entry in entries):
        legend.append("(name): a preset, the option of that name with other values of its fields")
    if any({*stages} > {*entry.stages} > set() for entry in entries):
        note = "[..]: acts at these stages only; [not ..]: at all but these. All stages"
        legend.append(f"{note} (gradsurg/sites/README.md): {', '.join(stages)}")
    examples = (one.command for one in entries if f" {one.group}." in one.command)
    if command := next(examples, ""):
        words = command.removeprefix("python -m gradsurg.run ")
        legend.append(f"A row ends with the fields and their defaults; to set one: {words}")
    lines = [folded(text, width) for text in legend]
    return "\n".join([*lines, *[""] * bool(lines), aligned(rows, len(rows[0]), width)])


def _purpose(entry: Entry, all_stages: Sequence[str]) -> str:
    """Return the summary, with the option that it is a preset of, some stages, and the paper."""
    text = f"{entry.summary} ({entry.preset_of})" if entry.preset_of else entry.summary
    missing = [stage for stage in all_stages if stage not in entry.stages]
    if entry.stages and missing:
        few = entry.stages if len(entry.stages) <= len(missing) else missing
        text += f" [{'not ' if few is missing else ''}{', '.join(few)}]"
    number = f", arXiv {entry.url.removeprefix(ARXIV)}" if entry.url else ""
    text = f"{text}. {entry.paper}{number}" if entry.paper else text
    shown = ": ".join(filter(None, (_class(entry), _shown(entry))))
    return f"{text}. {shown}" if shown else text


def _class(entry: Entry) -> str:
    """Return the name of the class of an option; the purpose of those of PyTorch names theirs."""
    return entry.target.rpartition(".")[2] if entry.group in FOLDERS else ""


def _shown(entry: Entry) -> str:
    """Return an entry's fields with their defaults, for example `max_norm=1.0 of.name=clip`."""
    return " ".join(f"{key}={value}" for key, value in _leaves(entry.fields))


def _leaves(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted names and values of all fields, except the class and Hydra's defaults."""
    for key, value in fields.items():
        match value:
            case dict():
                yield from _leaves(value, f"{prefix}{key}.")
            case _ if prefix or key not in (*HYDRAS, "defaults"):
                yield prefix + key, value if isinstance(value, str) else json.dumps(value)
