"""Find a user's class or function by its dotted path, `my_package.my_module.MyTransform`.

`check_targets` looks it up in the source without an import, because most such modules import torch.
"""

import ast
import importlib
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from typing import Any

from gradsurg.experiment.errors import leaves
from gradsurg.plugins.messages import one_line, unknown
from gradsurg.plugins.registry import is_own

DYNAMIC = {"*", "__getattr__", "globals", "exec", "vars", "setattr"}
"""A module that uses one of these names may define names that its source does not show."""


def import_path(path: object) -> object:
    """Import the object at a dotted path. Raises ImportError with the part that is missing."""
    module_name, name = _parts(path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise _no_module(error.name) from None
        raise ImportError(f"{module_name} cannot be imported: {one_line(error)}") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        kind = type(error).__name__
        raise ImportError(f"{module_name} cannot be imported: {kind}: {one_line(error)}") from error
    if not hasattr(module, name):
        own = [
            key
            for key, it in vars(module).items()
            if str(getattr(it, "__module__", "")).startswith(module_name)
        ]
        raise _no_name(module_name, name, own)
    return getattr(module, name)


def check_targets(config: Mapping[str, Any]) -> list[str]:  # Any: what YAML can hold
    """Return a line `key: text` for each `_target_` of a config that cannot be imported.

    Nothing is imported: a path that only an import can check passes.
    """
    faults = []
    for place, path in leaves(config):
        key, _, last = place.rpartition(".")
        if last != "_target_" or is_own({"_target_": path}):
            continue
        try:
            _look_up(path)
        except ImportError as error:
            faults.append(f"{key}: {error}{site_hint(path) if key == 'site' else ''}")
    return faults


def site_hint(path: object) -> str:
    """Return a hint for a dotted path given as a site, which may be meant as a parameter's name."""
    return f"; for names in the model write site=parameters site.pattern={path}"


def _look_up(path: object) -> None:
    """Raise the ImportError of `import_path` if the source shows that the object is missing."""
    module_name, name = _parts(path)
    spec = _spec(module_name)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        return
    try:
        nodes = ast.parse(spec.loader.get_data(spec.loader.path))
    except (SyntaxError, ValueError, OSError):
        return
    written = {word for node in ast.walk(nodes) for word in _names_in(node)}
    if name in written or written & DYNAMIC:
        return
    if PathFinder.find_spec(f"{module_name}.{name}", spec.submodule_search_locations or []):
        return
    if name == "py":
        raise ImportError(
            f"'{path}' is a file: name a class or function in it, {module_name}.<name>"
        )
    kinds = (ast.FunctionDef, ast.ClassDef)
    raise _no_name(module_name, name, [node.name for node in nodes.body if isinstance(node, kinds)])


def _spec(module_name: str) -> ModuleSpec | None:
    """Return the spec of a module without importing its packages. Raises ImportError if there is no
    such module; None if only an import can tell, for example of a module made at run time.
    """
    first, *others = module_name.split(".")
    try:
        spec = find_spec(first)
    except (ValueError, ImportError):
        return None
    name = first
    for part in others:
        if spec is None or spec.submodule_search_locations is None:
            break
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    if spec is None:
        raise _no_module(name)
    return spec if name == module_name else None


def _names_in(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(name=name, asname=asname):
            yield asname or name.partition(".")[0]


def _parts(path: object) -> tuple[str, str]:
    """Return the module and the name of a dotted path."""
    module_name, _, name = str(path).rpartition(".")
    if not module_name or not all(part.isidentifier() for part in str(path).split(".")):
        raise ImportError(f"'{path}' is not a dotted path, like my_package.my_module.MyTransform")
    return module_name, name


def _no_module(name: str) -> ImportError:
    return ImportError(f"there is no module '{name}' on the path, or in this folder")


def _no_name(module_name: str, name: str, own: list[str]) -> ImportError:
    choices = [each for each in own if not each.startswith("_")]
    return ImportError(unknown(f"there is no '{name}' in {module_name}", name, choices))
