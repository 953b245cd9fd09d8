"""Make the objects of a composed config by Hydra's `instantiate`; report each fault by its key.

Hydra stops at the first fault and writes its key into prose. Here each node is a mapping with a
`_target_`; a function of a gradient can stand in the place of the class of a transform.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast

from gradsurg.experiment.errors import joined
from gradsurg.experiment.own_code import import_path, site_hint
from gradsurg.plugins.fields import FieldError, check_booleans, unknown_fields
from gradsurg.plugins.messages import one_line, place_in_user_code, similar, unknown
from gradsurg.plugins.registry import HYDRAS, find, is_own, names
from gradsurg.sites.places import Selector
from gradsurg.tasks.base import Task
from gradsurg.tasks.data.given import task_of
from gradsurg.torch_internals import random_state
from gradsurg.transforms.base import Transform, as_transform
from gradsurg.triggers.base import Trigger

Made = TypeVar("Made")
Node = Mapping[str, Any]  # Any: what YAML can hold
Faults = Iterator[tuple[str, str]]
FOLDERS = {Transform: "transforms", Selector: "sites", Trigger: "triggers"}
"""The folder whose classes an error suggests for a wrong name; for other bases `aggregators`."""
GET_OBJECT = "hydra.utils.get_object"


def make(node: object, base: type[Made]) -> Made:
    """Return the object of a node. Raises FieldError with all wrong fields below it, and TypeError
    for an object of another kind.
    """
    node = _checked(node)
    target, is_users = _found(node), not is_own(node)
    if isinstance(target, type) and not _may_be(target, base):
        raise TypeError(f"must be {_a(base)}, found the class {target.__qualname__}")
    if target is not None and base is not Transform and not callable(target):
        raise TypeError(f"must be a class or a function, found {target!r}")
    if is_users:
        check_booleans(target, fields_of(node))
    calls = _with_functions(node) if base is Transform else node
    # A user's data are the same in every process.
    is_users_data = base is Task and is_users
    with random_state.preserved() if is_users_data else nullcontext():
        if is_users_data:
            random_state.seed(0)
        made = _instantiated(calls, base)
    result: Any = as_transform(made) if base is Transform else made
    if base is Task and not isinstance(made, Task):
        with user_code(node):
            result = task_of(made)
    if not isinstance(result, base):
        raise TypeError(f"must be {_a(base)}, found {result!r}")
    return cast(Made, result)


def call_of(node: object) -> tuple[Callable[..., object], dict[str, Any]]:
    """Return the class or function of a node with its fields, in which nested nodes are made.

    It is called later with the objects of a run. Raises the errors of `make`.
    """
    made: Any = _instantiated({**_checked(node), "_partial_": True}, object)
    return made.func, made.keywords


def _checked(node: object) -> Node:
    """Return a node. Raises ValueError for one without a `_target_`."""
    if isinstance(node, Mapping) and isinstance(node.get("_target_"), str):
        return node
    rule = "a _target_, which is gradsurg.Clip or another dotted path"
    if isinstance(node, Mapping):
        raise ValueError(f"needs {rule}; found the keys {', '.join(map(str, node))}")
    raise ValueError(f"must be a mapping with {rule}, found {node!r}")


def fields_of(node: Node) -> dict[str, Any]:  # Any: as above
    """Return the fields of a node, without Hydra's own keys."""
    return {key: value for key, value in node.items() if key not in HYDRAS}


@contextmanager
def user_code(node: Node, method: str = "") -> Iterator[None]:
    """Turn any error of a user's own class into a TypeError with its file and line."""
    try:
        yield
    except FieldError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        if is_own(node):
            raise
        raise TypeError(_raised(node, error, method)) from error


def _raised(node: Node, error: BaseException, method: str = "") -> str:
    called = f"{node['_target_']}.{method}" if method else node["_target_"]
    return f"{called} raised {type(error).__name__}: {one_line(error)}{place_in_user_code(error)}"


def _instantiated(node: Node, base: type) -> object:
    """Call Hydra's `instantiate`. Raises FieldError with all faults."""
    try:
        return _by_hydra(node)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise FieldError("", [*_faults(node, "", base, error)]) from error


def _by_hydra(node: object) -> object:
    import hydra.utils  # not needed by a loop of the user's

    # Without "all" Hydra 1.3 turns a dataclass in a list or a mapping into a config again.
    allow = getattr(hydra.utils, "execution_whitelist", None)  # Hydra 1.4 asks what may be called
    with allow(hydra.utils.UNSAFE_DISABLE_EXECUTION_CHECKS) if allow else nullcontext():  # pyright: ignore
        return hydra.utils.instantiate(node, _convert_="all")


def _faults(node: Any, key: str, base: type, error: BaseException | None = None) -> Faults:
    """Yield the faults of the nodes inside a node that Hydra refuses; if they have none, its own.

    `error` is the error that Hydra raised for the node. (Any: what YAML can hold.)
    """
    from hydra.errors import InstantiationException  # as in `_by_hydra`

    inner = node.items() if isinstance(node, Mapping) else enumerate(node)
    nodes = [(joined(key, str(name)), one) for name, one in inner if isinstance(one, dict | list)]
    inside = [fault for place, one in nodes for fault in _faults(one, place, base)]
    yield from inside
    if inside or not isinstance(node, Mapping) or "_target_" not in node:
        return
    if error is None or nodes:
        try:
            _by_hydra(node)
        except (Exception, SystemExit) as again:
            error = again
        else:
            return
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__  # a user's own chain of causes stays
    for field, text in _own_faults(node, base, error):
        yield joined(key, field), text


def _own_faults(node: Node, base: type, error: BaseException) -> Faults:
    """Yield the fields that `error` is about, or it as a fault of the whole node."""
    if isinstance(error, FieldError):
        yield from error.faults
        return
    try:
        target = import_path(node["_target_"])
    except ImportError as missing:
        yield "", _missing(node["_target_"], base, missing)
        return
    unknown = isinstance(error, TypeError) and unknown_fields(target, 0, fields_of(node), error)
    if unknown:
        yield from unknown
    elif not is_own(node):
        yield "", _raised(node, error)
    elif isinstance(error, (ValueError, TypeError, LookupError, ImportError, RuntimeError)):
        yield "", one_line(error)
    else:  # a fault of gradsurg's own code, which shows its traceback
        raise error


def _a(base: type) -> str:
    return f"{'an' if base.__name__[0] in 'AEIOU' else 'a'} {base.__name__}"


def _missing(target: str, base: type, error: ImportError) -> str:
    """Return the fault of a path that does not exist, with the classes that may be meant."""
    if target.startswith("gradsurg.") and target.count(".") == 1:
        folder = FOLDERS.get(base, "aggregators")
        classes = [find(folder, stem).__name__ for stem in names(folder)]
        near = [f"gradsurg.{name}" for name in similar(target.partition(".")[2], classes)]
        whole = [f"gradsurg.{name}" for name in classes]
        return unknown(f"there is no '{target}'", "", whole, near)
    return f"{error}{site_hint(target) if base is Selector else ''}"


def _found(node: Node) -> Any:  # Any: what a dotted path names
    """Return what a node calls, None for what cannot be imported."""
    try:
        return import_path(node["_target_"])
    except ImportError:
        return None


def _may_be(target: type, base: type) -> bool:
    """Whether a class can stand where a `base` is needed. Every class can be a task, and every
    class with callable instances a transform.
    """
    if base is Task or issubclass(target, base):
        return True
    return base is Transform and any("__call__" in vars(cls) for cls in target.__mro__)


def _with_functions(node: Any) -> Any:  # Any: what YAML can hold
    """Return a node that uses each function of a gradient as a transform, instead of calling it.

    A function that takes no gradient returns a transform. Raises FieldError for fields of
    an object that exists already.
    """
    if isinstance(node, list):
        return [*map(_with_functions, node)]
    if not isinstance(node, Mapping):
        return node
    node = {key: _with_functions(item) for key, item in node.items()}
    if "_target_" in node and is_own(node) and node.get("_partial_"):
        # It would be called with the gradient, like a function.
        raise FieldError("", [("", "_partial_: is for functions of your own")])
    if "_target_" not in node or is_own(node) or node.get("_partial_"):
        return node
    target, fields = _found(node), fields_of(node)
    if target is None or isinstance(target, type):
        return node
    get = {"_target_": GET_OBJECT, "path": node["_target_"]}
    if isinstance(target, Transform) or not callable(target):
        if fields:
            text = f"is made already and takes no fields, found {', '.join(fields)}"
            raise FieldError("", [("", text)])
        return get
    try:
        signature = inspect.signature(target)
    except ValueError:  # it is written in C, as torch.sign
        return get
    if not _binds(signature, (None,), fields) or _binds(signature, (), fields):
        return node
    return {**node, "_partial_": True} if fields else get


def _binds(signature: inspect.Signature, args: tuple[object, ...], fields: Node) -> bool:
    try:
        signature.bind(*args, **fields)
    except TypeError:
        return False
    return True
