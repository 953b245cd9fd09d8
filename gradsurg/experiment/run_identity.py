"""The identity of a run: the settings that are hashed into the name of its directory.

Two runs with the same identity are the same run: a command skips it if it is finished, and resumes
it otherwise. The identity has each setting that is meant to change a trained weight or a reported
number:

- `model`, `task`, `schedule`, the optimizer with the learning rate that is used, `steps`,
  `batch_size`, `seed`, `device`, `accumulate`, `precision`, `compile`; `until` with `eval_every`,
  which decides where such a run ends; `validation`, unless it is 0;
- the treatment: `transform`, `site`, `when`, the order of the transforms, and with an aggregator
  `aggregator` and `shared`. A plain control has only the `site` at which its gradients are
  measured, so that all treatments at one site share it; a control that acts has the treatment too;
- the version of gradsurg, and of PyTorch major and minor: another minor release has other kernels;
- `sources`: for each dotted path (`_target_`) a hash of its module and of each local module that it
  imports, so that an edit of a user's transform or of its helper gives a new run. Local modules
  belong neither to Python nor to an installed package;
- `data`: a hash of the files that the task reads.

Settings of output, logging, launching and measurement (`out`, `logger`, `threads`, `effects_every`,
`metric` ..) are left out, as are the runs to compare with (`seeds`, `splits`, `attribute`). An edit
of gradsurg's own source does not change it: `environment` records that instead.
"""

import ast
import hashlib
import importlib
import inspect
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy
import torch

from gradsurg import __version__
from gradsurg.experiment.controls import ArmKind
from gradsurg.plugins.registry import named

MAX_LABEL = 80
PACKAGE = Path(__file__).parents[1]

ADDED = {"reduce": "mean", "on_nonfinite": "propagate"}
"""Fields of `shared` added later: at these values they are left out, so old identities stay."""

CONSTANT = {"name": "constant"}
"""The value in an identity if there is no schedule."""

Config = Mapping[str, Any]  # Any: what YAML can hold


def run_identity(
    config: Config,
    arm: ArmKind,
    settings: Config,
    aggregated: bool,
    data_hash: str,
) -> dict[str, object]:
    """Return the config by which a run is identified.

    `config` has the resolved config groups; `settings` the short keys that change the training,
    `optimizer` and `schedule` among them. `aggregated` adds the aggregator to the treatment.
    """
    groups: dict[str, object] = {"model": config["model"], "task": config["task"]}
    if arm == "control":
        groups["site"] = config["site"]
    else:
        groups |= {key: config[key] for key in ("transform", "site", "when")}
        if aggregated:
            items = config["shared"].items()
            shared = {key: value for key, value in items if ADDED.get(key) != value}
            groups |= {"aggregator": config["aggregator"], "shared": shared}
        groups["order"] = [*config["transform"]]
        if arm != "treated":
            groups["control"] = arm
    groups = named(groups)
    schedule = settings["schedule"] or CONSTANT
    return {
        "gradsurg": __version__,
        "torch": ".".join(torch.__version__.split(".")[:2]),
        **named({**settings, "schedule": schedule}),
        **({"data": data_hash} if data_hash else {}),
        **groups,
        "sources": dict(sorted(_sources(groups))),
    }


def script_identity(
    script: Config, file: Path, module: str, surgery: Config, kind: str, seed: int
) -> dict[str, object]:
    """Return the config by which a run of a user's script is identified.

    `file` is the script, the module `module`; `script` has its name and words, `surgery` the groups
    of a treated arm, {} for a plain control; `kind` is the kind of an acting control, or empty.
    Import statements are followed to other files of the user's; the path must lead to them.
    """
    names = _imports(module, file, file.stat().st_mtime_ns)
    local = {name for name in names if (found := _file_of(name)) and _is_local(name, found)}
    sources = {module: hashlib.sha256(file.read_bytes()).hexdigest()[:8]}
    sources |= {name: _hash({name}) for name in local | _local_imports(local)}
    groups = named(surgery) | ({"order": [*surgery["transform"]]} if surgery else {})
    return {
        "gradsurg": __version__,
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "seed": seed,
        "script": script,
        **groups,
        **({"control": kind} if kind else {}),
        "sources": dict(sorted({**sources, **dict(_sources(surgery))}.items())),
    }


def run_hash(identity: Config) -> str:
    """Return the first eight hex digits of the sha256 of an identity's canonical JSON.

    The order of keys does not matter. Raises TypeError or ValueError for what JSON cannot hold.
    """
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def directory_name(label: str, identity: Config) -> str:
    """Return `<label>-<hash8>`, with characters that are unsafe in a file name replaced by `_`."""
    safe = re.sub(r"[^\w.,+=@-]+", "_", label, flags=re.ASCII)[:MAX_LABEL]
    return f"{safe}-{run_hash(identity)}"


@cache
def environment() -> dict[str, str]:
    """Return all versions that a result can depend on, with a hash of gradsurg's source."""
    files = sorted(PACKAGE.rglob("*.py"))
    source = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    return {
        "gradsurg": f"{__version__} (source {source})",
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def environment_changes(before: Mapping[str, str]) -> str:
    """Return a note on the differences from a checkpoint's environment; empty without any."""
    now = environment()
    changed = [name for name in now if before.get(name) != now[name]]
    if not changed:
        return ""
    old, new = (", ".join(f"{x} {of.get(x, 'unknown')}" for x in changed) for of in (before, now))
    rule = "the result may differ in some bits from an uninterrupted run"
    return f"resumed from a checkpoint made with {old}, now {new}: {rule}"


def edited_modules(before: Config, now: Config) -> list[str]:
    """Return the dotted paths and modules whose source differs; empty if another key does too."""
    if {**before, "sources": None} != {**now, "sources": None}:
        return []
    old, new = (config.get("sources") or {} for config in (before, now))
    return [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]


def _sources(config: object) -> Iterator[tuple[str, str]]:
    """Yield each dotted path in a config, and each local module behind it, with a hash."""
    if isinstance(config, Mapping):
        if isinstance(target := config.get("_target_"), str):
            path, _, name = target.rpartition(".")
            defined_in = getattr(getattr(importlib.import_module(path), name), "__module__", None)
            modules = {path, defined_in} & {*sys.modules}
            yield target, _hash(modules)
            yield from ((module, _hash({module})) for module in _local_imports(modules))
        config = [*config.values()]
    for value in config if isinstance(config, list) else ():
        yield from _sources(value)


def _hash(modules: set[str]) -> str:
    contents = sorted(file.read_bytes() for file in map(_file_of, modules) if file)
    return hashlib.sha256(b"".join(contents)).hexdigest()[:8]


def _file_of(module: str) -> Path | None:
    """The source of a module, imported or not, or None: one built into Python has no file."""
    if getattr(sys.modules.get(module), "__file__", None):
        file = inspect.getsourcefile(sys.modules[module])
        return Path(file) if file else None
    spec = _spec(module)
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def _spec(module: str) -> ModuleSpec | None:
    """Look a module up without importing it, or a package around it."""
    folders = None
    if parent := module.rpartition(".")[0]:
        package = sys.modules.get(parent) or _spec(parent)
        folders = getattr(package, "__path__", getattr(package, "submodule_search_locations", None))
        if folders is None:
            return None
    specs = (finder.find_spec(module, folders) for finder in sys.meta_path)
    return next(filter(None, specs), None)


def _local_imports(modules: set[str]) -> set[str]:
    """The local modules that `modules` import, directly or through another one, without these."""
    reached, waiting = set[str](), [*modules]
    while waiting:
        module = waiting.pop()
        file = None if module in reached else _file_of(module)
        if file is not None and (module in modules or _is_local(module, file)):
            reached.add(module)
            waiting += _imports(module, file, file.stat().st_mtime_ns)
    return reached - modules


def _is_local(module: str, file: Path) -> bool:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    return top != "gradsurg" or module.startswith("gradsurg.experiments.")


@cache
def _imports(module: str, file: Path, _modified: int) -> set[str]:  # _modified: for the cache
    """The modules in all import statements of a module, and the packages around them."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):  # an extension module
        return set()
    package = (module if file.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            around = package[: len(package) - node.level + 1] if node.level else []
            base = [*around, *filter(None, [node.module])]
            names += [".".join([*base, alias.name]) for alias in node.names]  # perhaps a class
    parts = [name.split(".") for name in names]
    parts = [each for each in parts if each[0] not in sys.stdlib_module_names]
    return {".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)}
