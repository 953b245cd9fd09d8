"""The words of a command line as Hydra's overrides: what can be said of them before composing."""

import re
from collections.abc import Sequence

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException

from gradsurg.config.blame import one_line
from gradsurg.config.build import GROUPS
from gradsurg.config.options import LAUNCHERS, LISTS, content_of, key_of, options_of
from gradsurg.plugins.fields import nearest


def read(overrides: Sequence[str], multirun: bool) -> tuple[list[list[str]], list[str]]:
    """Each override with the values that it sweeps over, and a fault for each that is none."""
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    words, faults = [], []
    for word in overrides:
        if word.startswith("="):
            faults.append(f"{word}: has no key before the =")
            continue
        try:
            (override,) = parser.parse_overrides([word])
            values = _values(override)
        except OverrideParseException as error:
            faults.append(_unparsed(word, error))
        except (ValueError, TypeError, HydraException) as error:
            faults.append(f"{word}: cannot be swept: {one_line(error)}")
        else:
            if override.is_sweep_override() and not multirun:
                faults.append(f"{word}: several values need a sweep: add -m")
            else:
                words.append(values)
    return words, faults


def known_options(
    overrides: Sequence[str], config_dirs: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The overrides without options that are not there, and a fault for each of those."""
    rest, faults = [], []
    for word in overrides:
        key, names, several = _group(word)
        options = options_of(key, config_dirs)
        wrong = [name for name in names if "." not in name and name not in options]
        wrong += [name for name in names if "." in name and "/" in name]
        if not options or (wrong == ["null"] and not several):
            rest.append(word)
            continue
        if several and len(names) > 1 and key in GROUPS and key not in LISTS:
            faults.append(f"{key}: takes one option, found [{', '.join(names)}]")
            continue
        faults += [_unknown(key, name, options) for name in wrong]
        right = [name for name in names if name not in wrong]
        if not wrong and (names or several):
            rest.append(word)
        elif not names and not several:
            faults.append(f"{key}: there is no ''. {nearest('', options)}")
        elif right:
            rest.append(f"{key}=[{','.join(right)}]")
    return rest, faults


def _unknown(group: str, name: str, options: list[str]) -> str:
    if group == "hydra/launcher" and name in LAUNCHERS:
        return f"{group}: '{name}' is not installed: pip install 'gradsurg[launchers]'"
    return f"{group}: there is no '{name}'. {nearest(name, options)}"


def each_once(overrides: Sequence[str], config_dirs: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides with each key of a list once, and a fault for each that stands there twice.

    Hydra merges `[clip,clip]`, and two options with one key, into one without a word.
    """
    rest, faults = [], []
    for word in overrides:
        group, names, several = _group(word)
        if group not in LISTS or not several:
            rest.append(word)
            continue
        first: dict[str, str] = {}
        for name in names:
            key = key_of(name)
            if key not in first:
                first[key] = name
                continue
            what = f"'{name}' stands twice"
            if name != first[key]:
                what = f"'{first[key]}' and '{name}' have the same key '{key}'"
            faults.append(
                f"{group}: {what} and would be merged into one; give the second a key of its own: "
                f"'+{group}.{key}_2={content_of(group, name, config_dirs)}'"
            )
        rest.append(f"{group}=[{','.join(first.values())}]")
    return rest, faults


def given_twice(overrides: Sequence[str]) -> list[str]:
    """A fault for each key that gets two values: Hydra takes the last one without a word."""
    first: dict[str, str] = {}
    faults = []
    for word in overrides:
        key = key_in(word)
        if first.setdefault(key, word) != word:
            faults.append(f"{key}: is given twice, {first[key]} and {word}")
    return faults


def key_in(word: str) -> str:
    """The key of an override, also of one that adds it."""
    return word.partition("=")[0].lstrip("+")


def is_sweep(word: str) -> bool:
    """Whether an override has several values; one that cannot be read has none."""
    try:
        return OverridesParser.create().parse_override(word).is_sweep_override()
    except OverrideParseException:
        return False


def _group(word: str) -> tuple[str, list[str], bool]:
    """Of an override: its key, the options that it would choose, and whether that is a list."""
    key, _, value = word.partition("=")
    inside = value.strip()
    several = inside.startswith("[") and inside.endswith("]")
    names = inside[1:-1].split(",") if several else [inside]
    return key, [name.strip(" '\"") for name in names if name.strip()], several


def _unparsed(word: str, error: OverrideParseException) -> str:
    key, _, value = word.partition("=")
    if "=" not in word and not word.startswith("~"):
        return f"{word}: is not key=value"
    if value.startswith("re:"):
        try:
            re.compile(value.removeprefix("re:"))
        except re.error as wrong:
            return f"{key}: is not a regular expression ({wrong}), found '{value}'"
    if value.startswith("~"):
        return f"{word}: cannot be read: a shell leaves ~ alone behind a =; write $HOME"
    reason = one_line(error).partition(" expecting ")[0].partition("LexerNoViable")
    reason = reason[0] or "it has a sign that needs quotes"
    advice = "Commas, brackets, braces and spaces need quotes"
    if not value.startswith(("[", "{")):
        advice += f" inside quotes: \"{key}='...'\""
    return f"{word}: cannot be read: {reason}. {advice}"


def _values(override: Override) -> list[str]:
    word = override.input_line or ""
    if not override.is_sweep_override():
        return [word]
    key = word.partition("=")[0]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]
