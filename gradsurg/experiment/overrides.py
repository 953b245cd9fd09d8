"""Check Hydra overrides before composing: syntax, options of groups, keys that are given twice.

Help needs this module, so it imports no torch.
"""

import ast
import json
import math
import re
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from gradsurg.experiment.launchers import LAUNCHERS, missing_launcher, sweeper_fault
from gradsurg.experiments import config_dirs as experiment_dirs
from gradsurg.plugins.messages import nearest
from gradsurg.plugins.registry import names as plugin_names
from gradsurg.plugins.registry import snake

GROUPS = (
    "transform",
    "site",
    "when",
    "aggregator",
    "model",
    "task",
    "optimizer",
    "schedule",
    "logger",
)
LISTS = ("transform", "logger")
"""The groups that take a list of options."""
MAX_RUNS = 10_000  # of a command without yes=true
YES = re.compile(r"\+*yes=true", re.IGNORECASE)


def _config_dir() -> Path:
    """Return the packaged copy of `conf` of a wheel, else that of the checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


CONFIG_DIR = _config_dir()
CONFIG_DIRS = (CONFIG_DIR, *experiment_dirs())


def register() -> None:
    """Register dotted paths and the configs of papers with Hydra."""
    SourcesRegistry.instance().register(DottedSource)
    Plugins.instance().register(ExperimentSearchPath)


class ExperimentSearchPath(SearchPathPlugin):
    """Add `experiments/<paper>/conf` of a checkout to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in experiment_dirs():
            search_path.append(folder.parent.name, f"file://{folder}")


class DottedSource(ConfigSource):
    """Makes a dotted path an option of a group: `model=my_module.make_model` is a `_target_`."""

    @staticmethod
    def scheme() -> str:
        return "dotted"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return "." in _stem(config_path)

    def list(self, config_path: str, results_filter: object) -> list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        group = config_path.rpartition("/")[0]
        target = _stem(config_path)
        config: dict[str, Any] = {"_target_": target}
        if group in LISTS:
            config = {key_of(target): config}
        header: dict[str, str | None] = {"package": None}
        return ConfigResult(
            provider=self.provider,
            path=f"dotted://{target}",
            config=OmegaConf.create(config),
            header=header,
        )


def without_expressions(words: Sequence[str]) -> list[str]:
    """Replace `when=steps(start=9) & ~flag()`, the algebra of triggers, by overrides of Hydra.

    Raises ValueError, with a line for the user, for an expression that cannot be read.
    """
    found: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        if key == "when" and re.search(r"[(&|~]", text):
            found += _trigger_overrides(text)
        else:
            found.append(word)
    return found


def _trigger_overrides(text: str) -> list[str]:
    try:
        condition = _condition(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        reason = "is no expression" if isinstance(error, SyntaxError) else str(error)
        example = "when='steps(start=100) & ~threshold(above=0.05, measure=norm)'"
        raise ValueError(f"when: {reason}, found {text!r}; write {example}") from None
    for name in _names_inside(condition):
        if name not in (known := plugin_names("triggers")):
            raise ValueError(f"when: there is no '{name}'. {nearest(name, known)}")
    words = [f"when={condition.pop('name')}"]
    for key, value in condition.items():
        # An override of a mapping would keep the keys that stand there.
        words += ["~when.of"] if isinstance(value, dict) else []
        added = "+" if isinstance(value, dict) else ""
        words.append(f"{added}when.{key}={_as_override(value)}")
    return words


def _names_inside(condition: dict[str, Any]) -> list[str]:  # Any: as below
    """Return the names of the triggers that a trigger combines."""
    parts = condition.get("of") or []
    parts = parts if isinstance(parts, list) else [parts]
    return [name for part in parts for name in (part["name"], *_names_inside(part))]


def _condition(node: ast.expr) -> dict[str, Any]:  # Any: what a YAML file can hold
    """Return the config of a trigger. Raises ValueError for what is no trigger."""
    match node:
        case ast.BinOp(left, ast.BitAnd() | ast.BitOr() as sign, right):
            name = "all_of" if isinstance(sign, ast.BitAnd) else "any_of"
            return {"name": name, "of": [_condition(left), _condition(right)]}
        case ast.UnaryOp(ast.Invert(), of):
            return {"name": "unless", "of": _condition(of)}
        case ast.Call(ast.Name(name), [], fields) if all(field.arg for field in fields):
            return {"name": name, **{str(field.arg): _field(field.value) for field in fields}}
        case ast.Name(name):
            return {"name": name}
        case ast.Call(ast.Name(name)):
            raise ValueError(f"{name} takes fields by name, as steps(start=100)")
        case _:
            raise ValueError(f"takes triggers with &, | and ~, and {ast.unparse(node)} is none")


def _field(node: ast.expr) -> object:
    """Return a number, a word (with or without quotes), null or a list of these."""
    words = {"null": None, "true": True, "false": False}
    match node:
        case ast.Name(name):
            return words.get(name, name)
        case ast.List(items):
            return [*map(_field, items)]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"needs a number or a word, and {ast.unparse(node)} is none") from None


def _as_override(value: object) -> str:
    match value:
        case dict():
            return f"{{{','.join(f'{key}:{_as_override(item)}' for key, item in value.items())}}}"
        case list():
            return f"[{','.join(map(_as_override, value))}]"
        case _:
            return json.dumps(value)


def parse(
    overrides: Sequence[str], multirun: bool, config_dirs: Sequence[str] = ()
) -> tuple[list[list[str]], list[str]]:
    """Return the values that each override sweeps over, and an error for each unreadable one."""
    agreed = any(YES.fullmatch(word) for word in overrides)
    most = sys.maxsize - 1 if agreed else MAX_RUNS
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    words, faults = [], []
    for word in overrides:
        if "=" in word and not key_in(word):
            faults.append(f"{word}: has no key before the =")
            continue
        try:
            (override,) = parser.parse_overrides([word])
            if override.is_sweep_override() and not multirun:
                faults.append(f"{word}: several values need a sweep: add -m")
                continue
            values = _values(override, most)
        except OverrideParseException as error:
            faults.append(_unreadable(word, error))
        except (ValueError, TypeError, AttributeError, HydraException) as error:
            faults.append(f"{word}: cannot be swept: {first_line(error)}")
        else:
            if not values:
                choices = options_of(key_in(word), config_dirs)
                listed = f". {nearest('', choices)}" if choices else ""
                faults.append(f"{word}: sweeps over no value{listed}")
            if len(values) > most:
                faults.append(f"{key_in(word)}: {too_many(f'over {most:,}', 'values')}")
            words.append(values)
    return words, faults


def split_unknown_options(
    overrides: Sequence[str], config_dirs: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the overrides without unknown options of groups, and an error for each unknown
    option."""
    rest, faults = [], []
    for word in overrides:
        key, names, is_list = _group_choice(word)
        options = options_of(key, config_dirs)
        if key == "hydra/sweeper":  # also one that is installed
            options = ["basic"]
        wrong = [name for name in names if "." not in name and name not in options]
        wrong += [name for name in names if "." in name and ("/" in name or _is_number(name))]
        if not options or (wrong == ["null"] and not is_list):
            rest.append(word)
            continue
        if is_list and len(names) > 1 and key in GROUPS and key not in LISTS:
            faults.append(f"{key}: takes one option, found [{', '.join(names)}]")
            continue
        faults += [_unknown_option(key, name, options) for name in wrong]
        right = [name for name in names if name not in wrong]
        if not wrong and (names or is_list):
            rest.append(word)
        elif not names and not is_list:
            faults.append(f"{key}: there is no ''. {nearest('', options)}")
        elif right:
            rest.append(f"{key}=[{','.join(right)}]")
    return rest, faults


def split_repeated_options(
    overrides: Sequence[str], config_dirs: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the overrides with each option of a list once, and an error for each repetition.

    Hydra silently merges `[clip,clip]`, and two options with one key.
    """
    rest, faults = [], []
    for word in overrides:
        group, names, is_list = _group_choice(word)
        if group not in LISTS or not is_list:
            rest.append(word)
            continue
        first: dict[str, str] = {}
        for name in names:
            key = key_of(name)
            if key not in first:
                first[key] = name
                continue
            repeated = f"'{name}' stands twice"
            if name != first[key]:
                repeated = f"'{first[key]}' and '{name}' have the same key '{key}'"
            faults.append(
                f"{group}: {repeated} and would be merged into one; give the second a key of its "
                f"own: '+{group}.{key}_2={_content_of(group, name, config_dirs)}'"
            )
        rest.append(f"{group}=[{','.join(first.values())}]")
    return rest, faults


def repeated_keys(overrides: Sequence[str]) -> list[str]:
    """Return an error for each key with two values: Hydra silently takes the last one."""
    first: dict[str, str] = {}
    faults = []
    for word in overrides:
        key = word.partition("=")[0].lstrip("+")  # `~key` and `+key=` together replace a node
        if first.setdefault(key, word) != word:
            faults.append(f"{key}: is given twice, {first[key]} and {word}")
    return faults


def wrong_config_dirs(config_dirs: Sequence[str]) -> list[str]:
    """Return an error for each missing folder, and each file with the name of one of gradsurg's,
    which would not be read."""
    faults = []
    for path in map(Path, config_dirs):
        if not path.is_dir():
            faults.append(f"--config-dir: there is no folder {path}")
        for file in sorted(path.glob("*/*.yaml")):
            if any((own / file.parent.name / file.name).is_file() for own in CONFIG_DIRS):
                faults.append(
                    f"--config-dir: {file} has the name of one of gradsurg's own and would not be "
                    "read; give it another"
                )
    return faults


def options_of(group: str, config_dirs: Sequence[str]) -> list[str]:
    """Return the options of a group, an empty list for any other key."""
    if group.startswith("hydra/"):
        return GlobalHydra.instance().config_loader().get_group_options(group)
    folders = [*CONFIG_DIRS, *map(Path, config_dirs)]
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def key_of(name: str) -> str:
    """Return the key of an option in its list: a dotted path has its last name in snake case."""
    return snake(name.rpartition(".")[2]) if "." in name else name


def key_in(word: str) -> str:
    """Return the key of an override, without the `+` or `~` before it."""
    return word.partition("=")[0].lstrip("+~")


def is_sweep(word: str) -> bool:
    """Return whether an override has several values; False for one that cannot be read."""
    try:
        return OverridesParser.create().parse_override(word).is_sweep_override()
    except (HydraException, ValueError):  # also a number of more digits than Python reads
        return False


def too_many(count: int | str, things: str) -> str:
    """Return the rule for more runs or jobs than `MAX_RUNS`."""
    shown = f"{count:,}" if isinstance(count, int) else count
    return f"{shown} {things} need yes=true, as more than {MAX_RUNS:,} do"


def first_line(error: Exception) -> str:
    """Return the first line of an error: Hydra's explanations stand below it."""
    return " ".join(str(error).split("\n")[0].split())


def _unknown_option(group: str, name: str, options: list[str]) -> str:
    if group == "hydra/launcher" and name in LAUNCHERS:
        return missing_launcher(name)
    if group == "hydra/sweeper":
        return sweeper_fault(name)
    if name.isidentifier() and Path(f"{name}.py").is_file():
        return f"{group}: {name}.py is a module; choose something in it: {group}={name}.<name>"
    return f"{group}: there is no '{name}'. {nearest(name, options)}"


def _content_of(group: str, name: str, config_dirs: Sequence[str]) -> str:
    """Return the content of an option as it is typed on a command line."""
    if "." in name:
        return f"{{_target_: {name}}}"
    files = [folder / group / f"{name}.yaml" for folder in (*CONFIG_DIRS, *map(Path, config_dirs))]
    config = OmegaConf.load(next(file for file in files if file.is_file()))
    fields = OmegaConf.to_container(OmegaConf.select(config, name, default=config))
    return json.dumps(fields).replace('"', "")


def _group_choice(word: str) -> tuple[str, list[str], bool]:
    """Return the key of an override, the options that it would choose, and whether it is a list."""
    key, _, value = word.partition("=")
    inside = value.strip()
    is_list = inside.startswith("[") and inside.endswith("]")
    names = inside[1:-1].split(",") if is_list else [inside]
    return key, [name.strip(" '\"") for name in names if name.strip()], is_list


def _unreadable(word: str, error: OverrideParseException) -> str:
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
    reason = first_line(error).partition(" expecting ")[0].partition("LexerNoViable")
    reason = reason[0] or "it has a sign that needs quotes"
    advice = "Commas, brackets, braces and spaces need quotes"
    if not value.startswith(("[", "{")):
        advice += f" inside quotes: \"{key}='...'\""
    return f"{word}: cannot be read: {reason}. {advice}"


def _values(override: Override, most: int) -> list[str]:
    """Return the words that an override sweeps over, one more than `most` if there are more."""
    word = override.input_line or ""
    if not override.is_sweep_override():
        return [word]
    match override.value():
        case RangeSweep(start=start, stop=stop) if not math.isfinite((stop or 0) - (start or 0)):
            raise ValueError("it has no end")
    key = word.partition("=")[0]
    values = islice(override.sweep_string_iterator(), most + 1)
    return [f"{key}={value}" for value in values]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _stem(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".yaml")
