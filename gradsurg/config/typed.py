"""What is said of objects in Python, in the words that were typed on the command line."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass

from gradsurg.config.culprits import Part, inside, joined, parts
from gradsurg.plugins.registry import find, names, snake
from gradsurg.sites.base import Selector
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import Chain
from gradsurg.triggers.base import Trigger

CHOICES = re.compile(r"(?<=can act at ).*|(?<=Choose ).*")
"""The rest of a sentence that tells where something can be done."""
OURS = re.compile(r"(?:site|when|transform)\b")
"""The keys whose faults speak of places and moments."""
SUBJECT = r"(?= (?:has|have|meets|cannot|acts)\b)"


def in_typed_words(
    lines: Iterable[str],
    selector: Selector | None,
    trigger: Trigger | None,
    transforms: Mapping[str, Transform],
) -> list[str]:
    """Faults with `site=nodes site.side=leave` in the place of `Nodes(pattern='*', ...)`, and
    without the names of classes that their keys tell already.
    """
    spelled = {**_parts("site", "sites", selector), **_parts("when", "triggers", trigger)}
    links = [(link, key) for key, own in transforms.items() for link in _links(own)]
    owners = {type(link).__name__: key for link, key in links}
    shown = {repr(link): key for link, key in links}
    classes = ["+".join(transforms), *owners, *(found.partition("(")[0] for found in spelled)]
    return [
        _in_typed_words(_whose(line, owners, shown), spelled, classes) if OURS.match(line) else line
        for line in lines
    ]


def _links(transform: Transform) -> tuple[Transform, ...]:
    return (transform, *(transform.links if isinstance(transform, Chain) else ()))


def _whose(line: str, owners: Mapping[str, str], shown: Mapping[str, str]) -> str:
    """`transform: Clip: ...` of several transforms as `transform.clip: ...`, and
    `transform: GrokfastEMA(decay=0.9) remembers` as `transform.grokfast_ema: remembers`.
    """
    key, _, text = line.partition(": ")
    for name, owner in shown.items():
        if key == "transform" and text.startswith(f"{name} "):
            return f"transform.{owner}: {text.removeprefix(f'{name} ')}"
    owner = owners.get(text.partition(": ")[0])
    return f"transform.{owner}: {text}" if key == "transform" and owner else line


def _parts(group: str, folder: str, whole: Part | None) -> dict[str, str]:
    """How each part is typed, by its repr, the whole before what it is made of; a user's own kind
    has no name to be typed.
    """
    own = names(folder)
    found = parts(whole) if whole is not None else ()
    return {
        repr(part): _spelled(group, path, part)
        for path, part in found
        if snake(type(part).__name__) in own
    }


def _in_typed_words(line: str, spelled: Mapping[str, str], classes: Iterable[str]) -> str:
    key, colon, text = line.partition(": ")
    field = key.rpartition(".")[2]
    rule, met, listed = _before_lists(text)
    for found, typed in spelled.items():
        rule = rule.removeprefix(f"{found}: ").replace(found, typed)
    for name in (*classes, field):
        rule = rule.removeprefix(f"{name}: ")
    kinds = "|".join(_kinds())
    rule = re.sub(rf"\b({kinds})\b{SUBJECT}", lambda own: f"site={snake(own[1])}", rule)
    rule = CHOICES.sub(lambda own: _choices(own[0], kinds), rule)
    return f"{key}{colon}{rule}{met}{listed}"


def _before_lists(text: str) -> tuple[str, str, str]:
    """What stands before a list of names, which are a user's own and stay as they are."""
    found = re.search(r" There are: | It has met: ", text)
    return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")


def _choices(text: str, kinds: str) -> str:
    """`Nodes with side='leave'` as `site=nodes with site.side=leave`, `when=ForTask(...)` as
    `when=for_task`.
    """
    text = re.sub(r"when=(\w+)\(\.\.\.\)", lambda found: f"when={snake(found[1])}", text)
    own = {field.name for kind in _kinds().values() for field in fields(kind)}
    given = rf"(?<![\w.])({'|'.join(sorted(own))})='?([\w*.]+)'?"
    text = re.sub(given, r"site.\1=\2", text)
    return re.sub(rf"\b({kinds})\b", lambda found: f"site={snake(found[1])}", text)


def _kinds() -> dict[str, type]:
    """The kinds of sites by the names of their classes."""
    found = (find("sites", stem) for stem in names("sites"))
    return {kind.__name__: kind for kind in found if is_dataclass(kind)}


def _spelled(group: str, path: str, part: Part) -> str:
    """The name of a selector or trigger and what differs from its defaults, as it is typed."""
    stem = snake(type(part).__name__)
    words = [f"{group}.{path}.name={stem}" if path else f"{group}={stem}"]
    below = inside(part)
    words += [_spelled(group, joined(path, key), own) for key, own in below]
    if is_dataclass(part):
        for field in fields(part):
            if below and field.name == "of":
                continue
            value = getattr(part, field.name)
            if field.default is MISSING or value != field.default:
                words.append(f"{joined(group, path, field.name)}={_value(value)}")
    return " ".join(words)


def _value(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple() | list():
            return f"[{','.join(map(_value, value))}]"
        case _:
            return str(value)
