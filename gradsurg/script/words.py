"""The command line: gradsurg's arguments, `--`, and the script with its own arguments."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradsurg.experiment.compose import (
    GROUPS,
    compose_config,
    search_path,
    split_config_dirs,
)
from gradsurg.experiment.errors import ConfigError
from gradsurg.experiment.grid import Axis, Grid
from gradsurg.experiment.hydra_errors import composing
from gradsurg.experiment.overrides import SWEEP, prepared
from gradsurg.experiment.own_code import check_targets
from gradsurg.experiment.settings import Settings, check_seeds, settings_of
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.messages import no_key, typed_command, unknown
from gradsurg.plugins.registry import HYDRAS
from gradsurg.script.numbers import Metric

SURGERY = ("transform", "site", "when")
SETTINGS = ("seeds", "seed", "control", "metric", "margin", "tune_seeds", "study", "out", "force")
SETTINGS += ("effects_every", "report", "dry_run", "retry_failed")
OWN = ("model", "jobs", "tune")
KNOWN = (*SURGERY, *SETTINGS, *OWN, "logger")
BACKWARD = "a script must call live.backward(losses) for it: see gs.compare"
FILL = re.compile(r"\{(seed|arm|out)\}")


@dataclass(frozen=True)
class Call:
    """A script, or with `is_module` a module, and its arguments."""

    name: str
    words: tuple[str, ...]
    is_module: bool = False

    @property
    def stem(self) -> str:
        """The name of its study."""
        name = self.name if self.is_module else Path(self.name).stem
        return re.sub(r"[^\w.,+=@-]+", "_", name, flags=re.ASCII).lstrip(".,+=@-") or "script"

    def with_option(self, key: str, value: object) -> "Call":
        """Return the call with another value of an option, which is added if it has none."""
        words, option = [*self.words], f"{key}={value}"
        for place, word in enumerate(words):
            if word.startswith(f"{key}="):
                return replace(self, words=(*words[:place], option, *words[place + 1 :]))
            if word == key and place + 1 < len(words):
                return replace(self, words=(*words[:place], key, str(value), *words[place + 2 :]))
        return replace(self, words=(*words, option))

    def filled(self, **values: object) -> list[str]:
        """Return the arguments with the seed, the arm and the folder of a run filled in."""
        return [FILL.sub(lambda found: str(values[found[1]]), word) for word in self.words]


@dataclass(frozen=True)
class Command:
    """A checked command line. `surgery` has the config groups of the treated arm, or is {} without
    a transform. `words` are gradsurg's own arguments, `loggers` is the config group `logger`.
    """

    words: tuple[str, ...]
    call: Call
    settings: Settings
    surgery: Mapping[str, Any]  # Any: what YAML can hold
    metric: Metric | None
    tune: Grid | None
    model: str
    jobs: int
    loggers: Mapping[str, Any]  # Any: as above

    @property
    def typed(self) -> list[str]:
        """All arguments, as typed."""
        call = self.call
        return [*self.words, "--", *["-m"] * call.is_module, call.name, *call.words]

    def with_values(self, values: Mapping[str, Any]) -> "Command":  # Any: as above
        """Return the command with other values of fields of the surgery or options of the script.

        Raises ConfigError for a field that the surgery does not have.
        """
        call, surgery = self.call, self.surgery
        for key, value in values.items():
            if key.partition(".")[0] in SURGERY:
                surgery = _with_field(surgery, key, key.split("."), value)
            else:
                call = call.with_option(key, value)
        return replace(self, call=call, surgery=surgery, tune=None)


def parse(words: Sequence[str]) -> Command:
    """Check a command line. Raises ConfigError with all faults that are found at once."""
    if "--" not in words:
        begin = next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))
        late = [word for word in words[begin:] if re.match(rf"({'|'.join(SURGERY)})[.=]", word)]
        script = [word for word in words[begin:] if word not in late] or ["SCRIPT.py"]
        missing = f"write {_typed([*words[:begin], *late], script)}: the -- is missing"
        raise ConfigError([_fault(each) for each in words[:begin] if each == "--list"] or [missing])
    place = [*words].index("--")
    own, behind = [*words[:place]], [*words[place + 1 :]]
    if behind in ([], ["-m"]):
        name = "MODULE" if behind else "SCRIPT.py"
        raise ConfigError([f"write {_typed(own, [*behind, name])}: {name} is missing"])
    call = _call(behind)
    folders, others = split_config_dirs(own)
    missing = _no_script(call)
    faults = [fault for word in others if (fault := _fault(word))]
    if faults:
        raise ConfigError([*missing, *faults])
    given = dict(word.lstrip("+").split("=", 1) for word in others)
    composed = [word for word in others if word.partition("=")[0] not in OWN]
    defaults = {"study": call.stem, "logger": "[]"}
    composed += [f"{key}={value}" for key, value in defaults.items() if key not in given]
    if folders:
        composed.append(search_path(*folders))
    try:
        with composing():
            config = compose_config(*prepared(composed))
    except ConfigError as error:
        raise ConfigError([*missing, *error.faults]) from None
    faults = [*missing, *check_targets(config), *check_seeds(own)]
    try:
        settings = settings_of({key: config[key] for key in (*SETTINGS, "tune_seeds")})
    except FieldError as error:
        raise ConfigError([*faults, *map(": ".join, error.faults)]) from None
    if faults:
        raise ConfigError(faults)
    surgery = {key: config[key] for key in SURGERY} if config.get("transform") else {}
    command = Command(
        words=tuple(own),
        call=call,
        settings=settings,
        surgery=surgery,
        metric=None if settings.metric is None else Metric.of(settings.metric),
        tune=_grid(given["tune"]) if given.get("tune", "null") != "null" else None,
        model=given.get("model", ""),
        jobs=_jobs(given.get("jobs", "1")),
        loggers=config.get("logger") or {},
    )
    for values in command.tune.combinations() if command.tune else ():
        command.with_values(values)
    return command


def _call(words: list[str]) -> Call:
    is_module = words[:1] == ["-m"]
    name, *others = words[is_module:]
    return Call(name, tuple(others), is_module)


def _no_script(call: Call) -> list[str]:
    """Return the fault of a script that does not exist."""
    name = call.name
    if call.is_module or Path(name).is_file():
        return []
    there = [path.name for path in sorted(Path(name).parent.glob("*.py"))]
    fault = "there is no such script"
    return [f"{name}: {unknown(fault, Path(name).name, there) if there else fault}"]


def _typed(own: Sequence[str], script: Sequence[str]) -> str:
    """Return a whole command, as it is to be typed."""
    return f"{typed_command('gradsurg.script')} {shlex.join([*own, '--', *script])}"


def _fault(word: str) -> str:
    """Return the fault of an argument of gradsurg's; empty if its key is known."""
    if word in ("-m", "--multirun") or (SWEEP.fullmatch(word) and not word.startswith("tune=")):
        key = word.partition("=")[0]
        return f"{key}: one value a command; with the same study= the next shares its control runs"
    if word.startswith("--list"):
        return f"{word}: python -m gradsurg.run --list lists the options"
    key, equals, value = word.lstrip("+~").partition("=")
    group = key.partition(".")[0].partition("@")[0]
    if not equals:
        return f"{word}: write KEY=VALUE, and the arguments of the script after --"
    if group == "aggregator":
        return f"aggregator: {value} cannot act in a script as it is: {BACKWARD}"
    if group.startswith("hydra"):
        return f"{key}: runs are processes of this machine here. Write jobs=4 for four at once"
    if group in KNOWN:
        return ""
    if group in (*GROUPS, *Settings.__annotations__, "shared"):
        return f"{key}: is the script's own. Give it after --, spelt as in the script"
    return f"{key}: {no_key(group, KNOWN)}"


def _jobs(text: str) -> int:
    if not text.isdecimal() or text == "0":
        raise ConfigError([f"jobs: must be a whole number >= 1, found {text}"])
    return int(text)


def _grid(text: str) -> Grid:
    """Return the grid of `tune`, in which an option of the script may begin with dashes."""
    parts = [part.strip() for part in text.strip("'\"").split(";") if part.strip()]
    dashes = [re.match(r"-*", part) for part in parts]
    try:
        grid = Grid.of(";".join(part.lstrip("-") for part in parts))
    except ValueError as error:
        raise ConfigError([f"tune: {error}"]) from None
    if len(grid.axes) != len(parts):
        raise ConfigError([f"tune: cannot be read, found {text}"])
    if rates := [axis.key for axis in grid.axes if not axis.values]:
        rule = "needs values, such as '--lr=[0.01,0.03,0.1]': the rate of a script is not known"
        raise ConfigError([f"tune: {rates[0]} {rule}"])
    axes = zip(grid.axes, dashes, strict=True)
    return Grid(tuple(_axis(axis, found[0] if found else "") for axis, found in axes))


def _axis(axis: Axis, dashes: str) -> Axis:
    return replace(axis, key=f"{dashes}{axis.key}")


def _with_field(
    config: Mapping[str, Any], path: str, keys: Sequence[str], value: object
) -> Mapping[str, Any]:  # Any: what YAML can hold
    key, *rest = keys
    nested = isinstance(config, Mapping)
    if not nested or key not in config:
        known = [each for each in config if each not in HYDRAS] if nested else []
        raise ConfigError([f"tune: {path}: {no_key(key, known)}"])
    inside = _with_field(config[key], path, rest, value) if rest else value
    return {**config, key: inside}
