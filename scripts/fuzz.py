"""Give the command random wrong input, and count each way in which it fails badly.

python scripts/fuzz.py [--count 5000] [--seed 0]

A command must end with exit code 0, 1 or 2 within 10 seconds, without a traceback, and write to the
current folder or to one that it names. The exit code is 1 if one does not.
"""

import argparse
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import yaml

from gradsurg import run
from gradsurg.experiment.compose import CONFIG_DIR

SECONDS, WAIT = 10, 120  # of the processor, and by the clock
MEMORY = 2**40  # address space that a case may add; drawing figures reserves much of it
PROGRESS = 100
FOLDER_KEYS = ("out", "study", "hydra.run.dir", "hydra.sweep.dir", "hydra.output_subdir")
LONG_KEYS = {"steps", "seeds", "seed", "accumulate", "experiment"}
"""Keys of which a right value may mean long training: only checked."""
BASE = {"seeds": "1", "logger": "none", "report": "false", "steps": "1"}
"""Added unless the command line has the key."""
TRANSFORMS = ("clip", "sign", "noise", "[clip,sign]", "mask", "scale_by_sign", "clip_norm", "none")
"""Values for `transform`, drawn more often than others."""

SWEEPS = """
1,2 a,b glob(*) glob(zzz*) range(0,3) range(3,0) range(0,inf) choice(1,2) choice() interval(0,1)
sort(1,2) shuffle(1,2) tag(a,1) int(x) float(1) str([1]) bool(x) range(0,1,0)
"""
STRANGE = ["", " ", "a\nb", "a\tb", "x" * 300, "9" * 5000, "[" * 200, "a." * 200, "{" * 50]
SIGNS = "\x1b[31mred ü 💥 \u202e \udcff ../x /proc/x /dev/null/x a/b \x7f a\x01"
STRANGE += SIGNS.split(" ")
WORDS = r"""
nan inf -inf -0.0 0 -1 1.5 1e12 1e400 1e-400 99999999999999999999 0x10 1_000 .5 +1
null true false yes none None NaN ??? auto a [] {} [[]] [null] [1.5] [true] [a,b] [,]
{a:1} {_target_:gradsurg.Clip} {_target_:os.getcwd} {_target_:5} {a:{b:[1]}} {name:null}
${lr} ${zzz} ${oc.env:NOPE} ${oc.env:HOME} ${steps} ${ ${a:b} ${${lr}} $HOME ${now:%Y}
[ ] { } ( ) ' " \ [1, {a: 'x "x re:( re: ~ ~/x = == := @ | ; %s {} {0} # ! * ,
"""
VALUES = [*WORDS.split(), *SWEEPS.split(), *STRANGE]
DOTTED = """
builtins.abs operator.neg builtins.print sys.exit builtins.int builtins.object math.pi torch.sign
torch.nn.Linear torch.nn.ReLU torch.optim.SGD gradsurg.transforms.clip.Clip .a a. a..b
gradsurg.transforms.base.Transform gradsurg.tasks.digits.Digits collections.abc.Mapping os.path
os.nope nope.nope builtins.None builtins.type builtins.input builtins.NotImplemented typing.Any
functools.partial abc.ABC gradsurg.run.main builtins.quit builtins.SystemExit os.getcwd 1.5 a.b.c
builtins.KeyboardInterrupt
"""
OPTIONS = """
-m --multirun --run --cfg=job --cfg=hydra --cfg=all --resolve --help --hydra-help --info -x -- -
--info=config --package=a --config-name=zzz --config-dir=zzz --config-dir=. --nope --version -c -mm
--shell-completion --experimental-rerun=zzz --config-path=zzz
"""
HYDRA = """
run.dir sweep.dir sweep.subdir mode sweeper.params launcher job.name job.chdir verbose job.id
output_subdir searchpath callbacks job_logging hydra_logging runtime.cwd overrides
"""
WRONG = {"value": 6, "field": 8, "unknown": 3, "option": 3, "syntax": 2}
WRONG |= {"dotted": 3, "hydra": 2, "flag": 1, "sweep": 2, "experiment": 1}
"""The ways in which a word is wrong, and how often each is drawn."""

_written: list[str] = []
_is_noting: list[bool] = []


class Hang(BaseException):
    """Raised by the alarm inside a command."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))  # asking for more fails at once
    codes, faults = Counter[object](), Counter[str]()
    for index in range(asked.count):
        words, code, found = case(f"{asked.seed}-{index}")
        codes[code] += 1
        faults.update(found.keys())
        for text in found.values():
            print(f"{asked.seed}-{index}: {words}\n  {text}", flush=True)
        if not (index + 1) % PROGRESS:
            print(f"{index + 1} ..", file=sys.stderr, flush=True)
    print(f"exit codes: {dict(codes)}; faults: {dict(faults)}")
    return 1 if faults else 0


def case(seed: str) -> tuple[list[str], object, dict[str, str]]:
    """Call the command, in an empty folder, with random words that follow from `seed`.

    Returns the words, the exit code, and the faults by kind.
    """
    words = command_line(Random(seed))
    parts = [word.lstrip("+~").partition("=") for word in words]
    values = {key: value for key, _, value in parts}
    with TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as place, chdir(place):
        folder = Path.cwd()
        allowed = [folder, *(folder / values[key] for key in FOLDER_KEYS if values.get(key))]
        code, faults, printed = _called(words)
        outside = [path for path in _written if not _inside(path, allowed)]
    if code not in (0, 1, 2, None):
        faults["exit code"] = f"ended with code {code!r}"
    if "Traceback (most recent call last)" in printed:
        faults["traceback"] = printed[-1000:]
    if outside:
        faults["written outside"] = f"wrote {', '.join(outside[:5])}"
    return words, code, faults


def _called(words: Sequence[str]) -> tuple[object, dict[str, str], str]:
    """Return the exit code of the command, None without one, its faults and its output."""
    code, faults, printed = 0, {}, StringIO()
    argv, sys.argv = sys.argv, ["command", *words]
    try:
        with redirect_stdout(printed), redirect_stderr(printed), _alarm(), _noting_writes():
            run.main()
    except SystemExit as end:
        code = 0 if end.code is None else end.code
    except Hang:
        code, frames = None, traceback.extract_tb(sys.exc_info()[2])
        place = next((frame for frame in reversed(frames) if "gradsurg" in frame.filename), None)
        faults["hang"] = f"ran for {SECONDS} s, at {place}"
    except BaseException:  # whatever the command lets through
        code, faults["traceback"] = None, traceback.format_exc(limit=-3)
    finally:
        sys.argv = argv
    return code, faults, printed.getvalue()


@contextmanager
def _alarm() -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise Hang

    # Other processes do not change the time of the processor; a command that sleeps has longer.
    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, SECONDS),
        (signal.SIGALRM, signal.ITIMER_REAL, WAIT),
    )
    before = [signal.signal(number, ring) for number, _, _ in timers]
    for _, timer, length in timers:
        signal.setitimer(timer, length)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


@contextmanager
def _noting_writes() -> Iterator[None]:
    """Collect in `_written` the paths of files and folders that Python code creates or changes."""
    if not _is_noting:
        sys.addaudithook(_note)  # Python cannot remove it
    _written.clear()
    _is_noting[:] = [True]
    try:
        yield
    finally:
        _is_noting[:] = [False]


def _note(event: str, arguments: tuple[object, ...]) -> None:
    places = {"os.rename": 1, "os.link": 1, "os.symlink": 1}
    places |= dict.fromkeys(("mkdir", "remove", "rmdir", "truncate", "chmod"), 0)
    if not _is_noting[0]:
        return
    if event == "open":
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        place = 0 if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) else None
    else:
        place = places.get(event, places.get(event.removeprefix("os.")))
    if place is None or not isinstance(target := arguments[place], str | bytes | os.PathLike):
        return
    name, last = str(os.fsdecode(target)), arguments[-1]
    if event != "open" and not os.path.isabs(name) and isinstance(last, int) and last >= 0:
        return  # relative to an open folder, which was noted by its path
    path = os.path.abspath(name)
    if path != os.devnull and not (event == "os.mkdir" and os.path.isdir(path)):
        _written.append(path)


def _inside(path: str, allowed: Sequence[Path]) -> bool:
    """Return whether a path is in an allowed folder, or above one, or holds compiled code."""
    return "__pycache__" in Path(path).parts or any(
        Path(path).is_relative_to(folder) or folder.is_relative_to(path) for folder in allowed
    )


def command_line(random: Random) -> list[str]:
    """Return a random command line; training with it is short."""
    folders = [path for path in sorted(CONFIG_DIR.iterdir()) if path.is_dir()]
    options = {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in folders}
    choices = {group: random.choice(names) for group, names in options.items()}
    del choices["experiment"]
    transform = random.choice(TRANSFORMS) if random.random() < 0.7 else choices["transform"]
    words = [f"transform={transform}"] if random.random() < 0.9 else []
    if random.random() < 0.15:  # options that go together
        words += [f"aggregator={choices['aggregator']}", "task=overlay", "model=multi_head"]
        words.append("task.num_train=100")
    for group in ("site", "when", "optimizer", "schedule"):
        words += [f"{group}={choices[group]}"] if random.random() < 0.25 else []
    kinds = random.choices([*WRONG], [*WRONG.values()], k=random.choice((0, 1, 1, 1, 1, 2, 3)))
    words += [_wrong(kind, random, choices) for kind in kinds]
    words += ["-m"] if random.random() < 0.1 else []
    if words and random.random() < 0.1:
        place = random.randrange(len(words))
        words[place] = _mutated(random, words[place])
    random.shuffle(words)
    keys = {word.lstrip("+~").partition("=")[0] for word in words}
    words += [f"{key}={value}" for key, value in BASE.items() if key not in keys]
    is_checked = (keys & LONG_KEYS or random.random() < 0.5) and "dry_run" not in keys
    return [*words, "dry_run=true"] if is_checked else words


def _wrong(kind: str, random: Random, choices: Mapping[str, str]) -> str:
    """Return a word that is wrong in one of the ways of WRONG."""
    pick, main = random.choice, _read(CONFIG_DIR / "config.yaml")
    keys = [key for key in main if key not in ("defaults", "hydra", "shared")]
    key = pick([*keys, *(f"shared.{key}" for key in main["shared"])])
    group, value, sign = pick([*choices]), pick(VALUES), pick(("", "", "", "+", "++", "~"))
    match kind:
        case "value":
            return f"{key}={value}"
        case "field":
            leaves = [*_leaves(_read(CONFIG_DIR / group / f"{choices[group]}.yaml")), "_target_"]
            name = f"{sign}{group}.{pick(leaves)}"
            return name if sign == "~" else f"{name}={value}"
        case "unknown":
            other = _mutated(random, pick([key, group]))
            return f"{sign}{pick((other, f'{key}.foo', f'{key}.0', 'a.b.c'))}={value}"
        case "option":
            group = pick([*choices, "experiment", "hydra/launcher", "hydra/sweeper"])
            return f"{sign}{group}={pick([*VALUES, _mutated(random, choices.get(group, 'none'))])}"
        case "syntax":
            word = pick(("transform=[clip,sign]", "transform.clip.value=0.1", "site=nodes"))
            for _ in range(random.randint(1, 4)):
                word = _mutated(random, word)
            return word
        case "dotted":
            forms = ("{}={}", "{}={}", "{}._target_={}", "+{}.x={{_target_:{}}}")
            return pick(forms).format(group, pick(DOTTED.split()))
        case "hydra":
            return (
                f"{sign}hydra.{pick(HYDRA.split())}={pick([*VALUES, '/proc/x', 'MULTIRUN', 'RUN'])}"
            )
        case "flag":
            return pick(OPTIONS.split())
        case "sweep":
            return f"{pick([group, key])}={pick(SWEEPS.split())}"
        case _:
            names = sorted(
                path.stem for path in CONFIG_DIR.parent.glob("**/conf/experiment/*.yaml")
            )
            return f"experiment={pick([*names, *STRANGE])}"


def _mutated(random: Random, word: str) -> str:
    """Return a word with one sign left out, replaced, doubled or added."""
    sign = random.choice("=+~[]{}(),.:;'\"\\$@!*? \n\x1b-_0aü")
    place = random.randrange(len(word) + 1)
    before, after = word[:place], word[place:]
    ends = (after[1:], sign + after[1:], after[:1] * 2 + after[1:], sign + after)
    return before + random.choice(ends)


def _leaves(content: Mapping[str, object], above: str = "") -> Iterator[str]:
    """Yield the dotted keys of the fields of an option."""
    for key, value in content.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key}.")


def _read(path: Path) -> dict[str, dict[str, object]]:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


if __name__ == "__main__":
    sys.exit(main())
