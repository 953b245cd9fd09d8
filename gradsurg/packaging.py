"""Save a model with a surgery in one file that holds their code too, by `torch.package`."""

import json
import pickle
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from torch.package.package_exporter import EmptyMatchError, PackageExporter, PackagingError
from torch.package.package_importer import PackageImporter

import gradsurg
from gradsurg.core.live import Live
from gradsurg.core.surgery import Surgery
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.plugins.messages import one_line
from gradsurg.torch_internals.hook_tables import foreign_hooks, module_tables, tensor_tables

PACKAGE, OBJECTS, ABOUT = "gradsurg_archive", "objects.pkl", "about.json"
NOT_PACKAGED = (PackagingError, EmptyMatchError, pickle.PicklingError)
NOT_PACKAGED += (TypeError, AttributeError, ValueError)


@dataclass(frozen=True)
class Contents:
    """The modules of an archive: those whose code is in it (`captured`), those that it imports from
    the environment in which it is loaded, and those replaced by mocks, which raise when used.
    """

    captured: tuple[str, ...]
    environment: tuple[str, ...]
    mocked: tuple[str, ...]

    def __str__(self) -> str:
        packages = dict.fromkeys(name.partition(".")[0] for name in self.environment)
        shown = (", ".join(names) or "none" for names in (self.captured, packages, self.mocked))
        return "captured: {}\nleft to the environment: {}\nmocked: {}".format(*shown)


def save(
    path: str | Path,
    model: nn.Module,
    surgery: Surgery,
    *,
    intern: Sequence[str] = (),
    extern: Sequence[str] = (),
    mock: Sequence[str] = (),
) -> Contents:
    """Write a model and a surgery with its state to an archive, and return its contents.

    The code of modules that belong to no installed package, such as your own transforms, is
    captured; gradsurg, torch and installed packages are left to the environment. `intern`, `extern`
    and `mock` are patterns of module names (`my_package.**`) that override this. Hooks on
    parameters are not stored, with a SurgeryWarning. Raises ValueError if the model or the surgery
    is attached, or if an object, a module or a pattern cannot be packaged.
    """
    of_params = {name: tensor_tables(param) for name, param in model.named_parameters()}
    tables = [*chain(*map(module_tables, model.modules()), *of_params.values())]
    if surgery.is_attached or len(foreign_hooks(*tables)) < sum(map(len, tables)):
        raise ValueError("the model is attached to a surgery: save it after the block, or close()")
    if lost := [name for name, hooks in of_params.items() if hooks]:
        text = f"hooks on parameters are not in the archive: {', '.join(lost)}"
        warnings.warn(text, SurgeryWarning, stacklevel=2)
    path = Path(path)
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with warnings.catch_warnings(), PackageExporter(draft) as exporter:
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")
            exporter.deny("__main__")  # loading would run the whole script
            for action, patterns in {"mock": mock, "intern": intern, "extern": extern}.items():
                for pattern in patterns:
                    getattr(exporter, action)(pattern, allow_empty=False)
            exporter.extern([f"{name}.**" for name in {"gradsurg", *packages_distributions()}])
            exporter.intern("**")
            exporter.save_pickle(PACKAGE, OBJECTS, (model, surgery))
            exporter.save_text(PACKAGE, ABOUT, json.dumps(_versions()))
        draft.replace(path)
    except NOT_PACKAGED as error:
        text = one_line(error).partition(" Set debug=True")[0]
        if "__main__" in text:
            text = "a class or function of the script itself (__main__); put it into a module"
        raise ValueError(f"cannot be packaged: {text}") from error
    finally:
        draft.unlink(missing_ok=True)
    modules = exporter.interned_modules(), exporter.externed_modules(), exporter.mocked_modules()
    return Contents(*(tuple(sorted(names)) for names in modules))


def load(
    path: str | Path, *, trust: bool = False, attach: bool = False
) -> tuple[nn.Module, Surgery, *tuple[Live, ...]]:
    """Return the model and the surgery of an archive; the state is as it was saved.

    With `attach` the surgery is attached to the model, and the third value is the `live` that
    `surgery.start(model)` returns: call `live.bind(optimizer)` with yours, and `live.close()`.

    Loading runs the code in the archive: ValueError without `trust=True`, and if the file is no
    archive of `save`. A SurgeryWarning names other versions of gradsurg or torch.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file '{path}'")
    if not trust:
        advice = "load(path, trust=True) if you trust its author"
        raise ValueError(f"'{path}' holds code, and loading runs it: {advice}")
    try:
        importer = PackageImporter(str(path))
        saved, here = json.loads(importer.load_text(PACKAGE, ABOUT)), _versions()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"'{path}' is no archive of gradsurg.packaging.save") from error
    if saved != here:
        before, now = (", ".join(map(" ".join, each.items())) for each in (saved, here))
        text = f"'{path}' was saved with {before}, loaded with {now}"
        warnings.warn(text, SurgeryWarning, stacklevel=2)
    model, surgery = importer.load_pickle(PACKAGE, OBJECTS)
    return (model, surgery, surgery.start(model)) if attach else (model, surgery)


def _versions() -> dict[str, str]:
    return {"gradsurg": gradsurg.__version__, "torch": torch.__version__}
