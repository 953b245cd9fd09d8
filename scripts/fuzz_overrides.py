"""Random command lines of the runner: wrong values, unknown keys, broken syntax, dotted paths."""

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import yaml
from fuzz_watch import SECONDS, Outcome, watched

from gradsurg import run
from gradsurg.experiment.compose import CONFIG_DIR

MEMORY = 2**40  # address space that a case may add; drawing figures reserves much of it
FOLDER_KEYS = ("out", "study", "hydra.run.dir", "hydra.sweep.dir", "hydra.output_subdir")
LONG_KEYS = ("steps", "seeds", "seed", "accumulate", "experiment")
"""Keys of which a right value may mean long training: only checked."""

BASE = {"seeds": "1", "logger": "none", "report": "false", "steps": "1"}
"""Added unless the command line has the key."""
TRANSFORMS = ("clip", "sign", "noise", "[clip,sign]", "mask", "scale_by_sign", "clip_norm", "none")
"""Values for `transform`, drawn more often than others."""

NUMBERS = "nan inf -inf -0.0 0 -1 1.5 1e12 1e400 1e-400 99999999999999999999 0x10 1_000 .5 +1"
WORDS = "null true false yes none None NaN ??? auto a [] {} [[]] [null] [1.5] [true] [a,b] [,]"
MAPPINGS = (
    "{a:1} {_target_:gradsurg.Clip} {_target_:os.getcwd} {_target_:5} {a:{b:[1]}} {name:null}"
)
INTERPOLATIONS = (
    "${lr} ${zzz} ${oc.env:NOPE} ${oc.env:HOME} ${steps} ${ ${a:b} ${${lr}} $HOME ${now:%Y}"
)
BROKEN = "[ ] { } ( ) ' \" \\ [1, {a: 'x \"x re:( re: ~ ~/x = == := @ | ; %s {} {0} # ! * ,"
SWEEPS = "1,2 a,b glob(*) glob(zzz*) range(0,3) range(3,0) range(0,inf) choice(1,2) choice() "
SWEEPS += (
    "interval(0,1) sort(1,2) shuffle(1,2) tag(a,1) int(x) float(1) str([1]) bool(x) range(0,1,0)"
)
STRANGE = [
    "",
    " ",
    "\x1b[31mred",
    "a\nb",
    "a\tb",
    "ü",
    "💥",
    "\u202e",
    "\udcff",
    "x" * 300,
    "9" * 5000,
]
STRANGE += [
    "[" * 200,
    "a." * 200,
    "../x",
    "/proc/x",
    "/dev/null/x",
    "a/b",
    "\x7f",
    "a\x01",
    "{" * 50,
]
VALUES = [
    *" ".join([NUMBERS, WORDS, MAPPINGS, INTERPOLATIONS, BROKEN, SWEEPS]).split(),
    *STRANGE,
]

DOTTED = "builtins.abs operator.neg builtins.print sys.exit builtins.int builtins.object math.pi "
DOTTED += "torch.sign torch.nn.Linear torch.nn.ReLU torch.optim.SGD gradsurg.transforms.clip.Clip "
DOTTED += "gradsurg.transforms.base.Transform gradsurg.tasks.digits.Digits collections.abc.Mapping "
DOTTED += "os.path os.nope nope.nope .a a. a..b builtins.None builtins.type builtins.input "
DOTTED += "builtins.NotImplemented functools.partial typing.Any abc.ABC gradsurg.run.main "
DOTTED += "builtins.quit builtins.SystemExit builtins.KeyboardInterrupt os.getcwd 1.5 a.b.c"

OPTIONS = (
    "-m --multirun --run --cfg=job --cfg=hydra --cfg=all --resolve --help --hydra-help --info "
)
OPTIONS += "--info=config --package=a --config-name=zzz --config-dir=zzz --config-dir=. --nope "
OPTIONS += "-x --version --shell-completion --experimental-rerun=zzz --config-path=zzz -c - -- -mm"

HYDRA = "run.dir sweep.dir sweep.subdir mode sweeper.params launcher job.name job.chdir verbose "
HYDRA += "output_subdir searchpath job.id callbacks job_logging hydra_logging runtime.cwd overrides"


def case(seed: str, folder: Path, seconds: float = SECONDS) -> Iterator[Outcome]:
    """Call the command in `folder` with random arguments that follow from `seed`."""
    words = command_line(Random(seed))
    parts = [word.lstrip("+~").partition("=") for word in words]
    values = {key: value for key, _, value in parts}
    named = [value for key in FOLDER_KEYS if (value := values.get(key)) and "\0" not in value]
    named = ["." if "${" in value else value for value in named]  # as ${now:%Y}: any name
    inside = [folder / name for value in named for name in (value, _as_number(value))]
    yield watched(run.main, words, [folder / values.get("out", "runs"), *inside], seconds)


def _as_number(value: str) -> str:
    """Return a number as Hydra writes it: `1_000` is 1000, `.5` is 0.5."""
    try:
        return str(int(value)) if value.replace("_", "").isdecimal() else str(float(value))
    except ValueError:
        return value


def prepare() -> None:
    """Limit the memory, so that a case that asks for far too much fails at once."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def command_line(random: Random) -> list[str]:
    """Return a random command line; what it would train is short."""
    choices = {group: random.choice(names) for group, names in _groups().items()}
    words = _plain(random, choices)
    kinds = (_wrong_value, _wrong_field, _unknown_key, _wrong_option, _broken_syntax)
    kinds += (_dotted, _hydra, _option, _swept, _experiment)
    weights = (6, 8, 3, 3, 2, 3, 2, 1, 2, 1)
    for kind in random.choices(kinds, weights, k=random.choice((0, 1, 1, 1, 1, 2, 3))):
        words.append(kind(random, choices))
    if random.random() < 0.1:
        words.append("-m")
    if random.random() < 0.1:
        position = random.randrange(len(words))
        words[position] = _mutated(random, words[position])
    random.shuffle(words)
    words = [word.replace("\0", "") for word in words]
    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    base = [f"{key}={value}" for key, value in BASE.items() if key not in keys]
    if keys & {*LONG_KEYS} or random.random() < 0.5:
        base += ["dry_run=true"] if "dry_run" not in keys else []
    return words + base


def _plain(random: Random, choices: Mapping[str, str]) -> list[str]:
    """Return choices of options, mostly of one that go together."""
    words = []
    if random.random() < 0.9:
        often = random.random() < 0.7
        words.append(f"transform={random.choice(TRANSFORMS) if often else choices['transform']}")
    if random.random() < 0.15:
        words += [f"aggregator={choices['aggregator']}", "task=overlay", "model=multi_head"]
        words.append("task.num_train=100")
    for group in ("site", "when", "optimizer", "schedule"):
        if random.random() < 0.25:
            words.append(f"{group}={choices[group]}")
    return words


def _wrong_value(random: Random, choices: Mapping[str, str]) -> str:
    return f"{random.choice(_short_keys())}={random.choice(VALUES)}"


def _wrong_field(random: Random, choices: Mapping[str, str]) -> str:
    """Return an unusual value of a field of an option, chosen or not."""
    group = random.choice([*choices])
    keys = _fields(group, choices[group]) or ["_target_"]
    value = random.choice(VALUES)
    prefix = random.choice(("", "", "", "", "+", "++", "~"))
    key = f"{group}.{random.choice(keys)}"
    return f"~{key}" if prefix == "~" and random.random() < 0.7 else f"{prefix}{key}={value}"


def _unknown_key(random: Random, choices: Mapping[str, str]) -> str:
    key = random.choice([*_short_keys(), *choices])
    key = random.choice(
        (_mutated(random, key), f"{key}.foo", f"{key}.0", f"{key}.foo.bar", "a.b.c")
    )
    return f"{random.choice(('', '+', '++', '~'))}{key}={random.choice(VALUES)}"


def _wrong_option(random: Random, choices: Mapping[str, str]) -> str:
    group = random.choice([*choices, "experiment", "hydra/launcher", "hydra/sweeper"])
    value = random.choice([*VALUES, _mutated(random, choices.get(group, "none"))])
    return f"{random.choice(('', '', '+', '++', '~'))}{group}={value}"


def _broken_syntax(random: Random, choices: Mapping[str, str]) -> str:
    word = random.choice(("transform=[clip,sign]", "transform.clip.value=0.1", "site=nodes"))
    for _ in range(random.randint(1, 4)):
        word = _mutated(random, word)
    return word


def _dotted(random: Random, choices: Mapping[str, str]) -> str:
    path = random.choice(DOTTED.split())
    group = random.choice([*choices])
    match random.randrange(4):
        case 0:
            return f"{group}._target_={path}"
        case 1:
            return f"+{group}.x={{_target_:{path}}}"
        case _:
            return f"{group}={path}"


def _hydra(random: Random, choices: Mapping[str, str]) -> str:
    value = random.choice([*VALUES, "/proc/x", "MULTIRUN", "RUN"])
    return f"{random.choice(('', '', '+', '~'))}hydra.{random.choice(HYDRA.split())}={value}"


def _option(random: Random, choices: Mapping[str, str]) -> str:
    return random.choice(OPTIONS.split())


def _swept(random: Random, choices: Mapping[str, str]) -> str:
    key = random.choice([*choices, *_short_keys()])
    return f"{key}={random.choice(SWEEPS.split())}"


def _experiment(random: Random, choices: Mapping[str, str]) -> str:
    names = sorted(path.stem for path in CONFIG_DIR.parent.glob("**/conf/experiment/*.yaml"))
    return f"experiment={random.choice([*names, *STRANGE])}"


def _mutated(random: Random, word: str) -> str:
    """Return a word with one sign left out, replaced, doubled or added."""
    signs = "=+~[]{}(),.:;'\"\\$@!*? \n\x1b-_0aü"
    place = random.randrange(len(word) + 1)
    before, after = word[:place], word[place:]
    return random.choice(
        (before + after[1:], before + random.choice(signs) + after, before + after[:1] * 2 + after)
    )


def _groups() -> dict[str, list[str]]:
    """Return the options of each group."""
    folders = [path for path in sorted(CONFIG_DIR.iterdir()) if path.is_dir()]
    options = {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folders}
    return {group: names for group, names in options.items() if group != "experiment"}


def _short_keys() -> list[str]:
    """Return the keys of the main file that are no groups."""
    config = _read(CONFIG_DIR / "config.yaml")
    keys = [key for key in config if key not in ("defaults", "hydra", "shared")]
    return [*keys, *(f"shared.{key}" for key in config["shared"])]


def _fields(group: str, option: str) -> list[str]:
    """Return the dotted keys of the fields of an option."""
    return [*_leaves(_read(CONFIG_DIR / group / f"{option}.yaml"))]


def _leaves(content: Mapping[str, object], above: str = "") -> Iterator[str]:
    for key, value in content.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")


def _read(path: Path) -> dict[str, dict[str, object]]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}
