"""Words of the command line: the two rewritings, and checks of what Hydra accepts silently.

A word is one argument. docs/sweeps.md says what each rewriting stands for in Hydra's grammar. No
module here imports torch: a wrong word is answered at once.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from gradsurg.experiment.compose import (
    CONFIG_DIR,
    GROUPS,
    PRESETS,
    files_of,
    split_config_dirs,
)
from gradsurg.experiment.errors import ConfigError, leaves
from gradsurg.experiment.hydra_errors import no_option
from hydra_plugins.gradsurg_dotted.dotted_source import LISTS, key_of

UNQUOTED = re.compile(r"^(tune|until)=(?!null$)([^'\"].*)", re.DOTALL)
FIELD = re.compile(rf"((?:{'|'.join(GROUPS)})\.[\w.]+)=([^,()'\"\[]+|\[[^()\[\]]*\])")
"""An override of one field of an option, such as transform.clip.value=1, with a single value."""
SWEEP = re.compile(r"(\w+)=(\w+\(.*|(?:[^,\[\]]|\[[^\[\]]*\])*,.*)", re.DOTALL)
"""A word that lists several values: transform=clip,sign, or transform=choice(clip,sign)."""


def prepared(words: Sequence[str]) -> list[str]:
    """Return the words as Hydra reads them: `tune` and `until` quoted, options before overrides.

    In a sweep of Hydra's own sweeper over transforms, `transform.clip.value=1` becomes
    `transform.clip.value=choice(1)`: Hydra first composes a config without the swept options, which
    lacks that key. Raises ConfigError for what Hydra accepts silently.
    """
    faults = [*_typing(words), *_repeated_keys(words), *_hidden_files(words)]
    faults += [fault for word in words for fault in (*_swallowed(word), *_refused(word))]
    if faults:
        raise ConfigError(faults)
    read = [UNQUOTED.sub(r'\1="\2"', word) for word in words]
    if {"-m", "--multirun"} & {*words} and not any("hydra/sweeper=" in word for word in words):
        swept = {found[1] for word in words if (found := SWEEP.fullmatch(word))}
        for place, word in enumerate(read):
            found = FIELD.fullmatch(word)
            if found and word.partition(".")[0] in swept:
                read[place] = f"{found[1]}=choice({found[2]})"
    # Hydra's argument parser needs all overrides in one block: put options before them.
    behind = [word for word in read if "=" in word and not word.startswith("-")]
    return [word for word in read if word not in behind] + behind


def _typing(words: Sequence[str]) -> Iterator[str]:
    """Yield an error for `--seeds 3` and `seeds = 3`, which are `seeds=3`."""
    keys = {*GROUPS, *OmegaConf.load(CONFIG_DIR / "config.yaml")}
    for before, word, value in zip(["", *words], words, [*words[1:], ""], strict=False):
        key, _, given = word.removeprefix("--").partition("=")
        if word.startswith("--") and key in keys:
            yield f"{word}: write {key}={given or value}, a key, not a flag"
        if word.startswith("=") or (before in keys and word == "="):
            yield f"{before}: write {before}={given or value}, without spaces around ="


def _repeated_keys(words: Sequence[str]) -> Iterator[str]:
    """Yield an error for each key with two values: Hydra silently takes the last one."""
    first: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0].lstrip("+")  # `~key +key=..` is allowed: it replaces a node
        if "=" in word and not word.startswith("-") and first.setdefault(key, word) != word:
            yield f"{key}: is given twice, {first[key]} and {word}"


def _hidden_files(words: Sequence[str]) -> Iterator[str]:
    """Yield an error for each file of `--config-dir` that one of gradsurg's hides."""
    for folder in filter(os.path.isdir, split_config_dirs(words)[0]):
        for file in sorted(folder.glob("*/*.yaml")):
            if (CONFIG_DIR / file.parent.name / file.name).is_file():
                yield (
                    f"--config-dir: {file} has the name of one of gradsurg's own and would not be "
                    "read; give it another"
                )


def _refused(word: str) -> Iterator[str]:
    """Yield an error for a preset, and for a launcher under torchrun."""
    key, _, value = word.lstrip("+").partition("=")
    if key.partition(".")[0].partition("@")[0] == PRESETS:
        yield f"{key}: is a group for the configs of your own app; here write {_words_of(value)}"
    if key == "hydra/launcher" and value != "basic" and os.environ.get("WORLD_SIZE", "1") != "1":
        yield f"{key}: {value} starts processes of its own, which cannot be those of torchrun"


def _words_of(preset: str) -> str:
    """Return the words of this command line that stand for a preset; an example for another."""
    if (path := files_of(PRESETS).get(preset)) is None:
        return "transform=clip"
    config: Any = OmegaConf.to_container(OmegaConf.load(path))
    chosen = [entry for entry in config.pop("defaults") if isinstance(entry, Mapping)]
    groups = {key.partition("@")[2]: option for entry in chosen for key, option in entry.items()}
    words = [f"{key}={option[0] if key in LISTS else option}" for key, option in groups.items()]
    words += [f"{key}={value}" for key, value in leaves(config)]
    defaults = ("site=parameters", "when=always", "shared.granularity=whole")
    return " ".join(word for word in words if word not in defaults)


def _swallowed(word: str) -> Iterator[str]:
    """Yield an error for values of a group that Hydra accepts silently, such as `[clip,clip]`."""
    key, _, value = word.partition("=")
    if key not in GROUPS:
        return
    if value.strip() == "null":
        plain_run = "; 'transform=none' is a plain run" if key == "transform" else ""
        yield f"{key}: must name an option, found null{plain_run}"
    for inside in re.findall(r"\[([^\[\]{}]*)\]", value) or [value]:
        options = [option.strip(" '\"") for option in inside.split(",") if option.strip()]
        for option in options:
            if "/" in option:
                yield f"{key}: {no_option(key, option, [*files_of(key)])}"
        if (is_list := inside != value) and key not in LISTS and len(options) > 1:
            yield f"{key}: takes one option, found [{', '.join(options)}]"
        first: dict[str, str] = {}
        for option in options if is_list and key in LISTS else ():
            place = key_of(option)
            if place in first:
                yield _repeated_option(key, first[place], option, place)
            first.setdefault(place, option)


def _repeated_option(group: str, before: str, option: str, key: str) -> str:
    both = f"'{before}' and '{option}' have the same key '{key}'"
    text = f"'{option}' is listed twice" if option == before else both
    content = f"{{_target_: {option}}}"
    if file := files_of(group).get(option):
        fields = OmegaConf.to_container(OmegaConf.select(OmegaConf.load(file), option))
        content = json.dumps(fields).replace('"', "")
    return (
        f"{group}: {text} and would be merged into one; give the second a key of its own: "
        f"'+{group}.{key}_2={content}'"
    )
