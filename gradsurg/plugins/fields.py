"""Frozen dataclasses with validated fields; errors have one line for each wrong field."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Signature, signature
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails

from gradsurg.plugins.messages import unknown

Class = TypeVar("Class", bound=type)

CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

RULES = {
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "finite_number": "must be finite",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_too_short": "must not be empty",
    "too_short": "must have at least {min_length} item",
    "too_long": "must have at most {max_length} items",
    "callable_type": "must be a function",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "sequence_str": "must be a list",
    "literal_error": "must be one of {expected}",
    "is_instance_of": "must be a {class}",
    "string_pattern_mismatch": "must match {pattern}",
    "value_error": "{error}",
}


class FieldError(ValueError):
    """Fields of an object that break a rule; `faults` holds a (field, sentence) for each.

    `owner` is the object, or the name of its class. An empty field stands for the whole object.
    `label` takes the place of class and field in the message.
    """

    def __init__(self, owner: object, faults: list[tuple[str, str]], label: str = "") -> None:
        self.owner = owner
        self.faults = faults
        name = label or (owner if isinstance(owner, str) else type(owner).__name__)
        super().__init__(
            "\n".join(
                f"{name}.{field}: {text}" if field and not label else f"{name}: {text}"
                for field, text in faults
            )
        )


class SelectionError(FieldError, LookupError):
    """A field of `owner` that selects nothing; `text` lists the choices."""

    def __init__(self, owner: object, field: str, text: str, label: str = "") -> None:
        super().__init__(owner, [(field, text)], label)


class Contradiction(ValueError):
    """Raised in `__post_init__` when two fields contradict each other; it names `field`."""

    def __init__(self, field: str, rule: str) -> None:
        self.field = field
        super().__init__(rule)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def validated(cls: Class) -> Class:
    """Make `cls` a frozen dataclass that checks its fields when it is made.

    NaN and infinity are refused in every float field, unknown fields everywhere; each fault is
    one line of a `FieldError`.
    """
    # Any: pydantic types its result as its own protocol, not as the class it was given.
    checked: Any = dataclass(frozen=True, config=CONFIG)(cls)
    validate = checked.__init__
    ordered = sorted(fields(checked), key=lambda field: bool(field.kw_only))
    defaults = {field.name: field.default for field in ordered}
    places = [field.name for field in ordered if not field.kw_only]

    @wraps(validate)
    def init(self: object, *args: object, **kwargs: object) -> None:
        if len(args) > len(places):
            raise FieldError(cls.__name__, [("", _too_many([*defaults], places))])
        given = dict(zip(places, args, strict=False))
        faults = [(name, "is given twice") for name in given if name in kwargs]
        given |= kwargs
        if not faults:
            try:
                validate(self, **given)
            except ValidationError as error:
                unions = [field.name for field in ordered if _is_union(field.type)]
                errors = _by_one_member(error.errors(), unions)
                faults = [_fault(details, defaults) for details in errors]
            else:
                for name, value in given.items():
                    faults += _booleans_as_numbers(name, value, getattr(self, name, value))
        if faults:
            raise FieldError(cls.__name__, faults) from None

    checked.__init__ = init
    if "__signature__" in vars(checked):  # not with an __init__ of the class's own
        checked.__signature__ = _Bare(vars(checked)["__signature__"])
    return checked


class _Bare:
    """A signature as `help` and notebooks show it: types without bounds and validators."""

    def __init__(self, generated: Any) -> None:  # Any: pydantic's private descriptor
        self.generated = generated

    def __get__(self, instance: object, owner: type) -> Signature:
        full = self.generated.__get__(instance, owner)  # an instance has none: AttributeError
        types = get_type_hints(owner)
        bare = [one.replace(annotation=types[one.name]) for one in full.parameters.values()]
        return full.replace(parameters=bare)


def only_changed_field(owner: Any) -> str:  # Any: an instance of any dataclass
    """Return the one field that differs from its default, or an empty string."""
    own = fields(owner) if is_dataclass(owner) else ()
    changed = [field.name for field in own if getattr(owner, field.name) != field.default]
    return changed[0] if len(changed) == 1 else ""


def in_short(part: Any) -> str:  # Any: a transform, a selector, a trigger or an aggregator
    """Return the repr of an object without the fields that have their defaults."""
    if isinstance(part, tuple):
        return f"({', '.join(map(in_short, part))})"
    if not is_dataclass(part) or isinstance(part, type):
        return getattr(part, "__qualname__", "") or repr(part)  # without a memory address
    pairs = ((field, getattr(part, field.name)) for field in fields(part))
    changed = [
        f"{field.name}={in_short(value)}" for field, value in pairs if value != field.default
    ]
    return f"{type(part).__name__}({', '.join(changed)})"


def call_with_fields(
    factory: object, args: tuple[object, ...], fields: Mapping[str, object]
) -> object:
    """Call a class or function; FieldError, with the choices, for fields that it does not have."""
    if not callable(factory):
        raise FieldError("", [("", f"must be a class or a function, found {factory!r}")])
    check_booleans(factory, fields)
    try:
        return factory(*args, **fields)
    except TypeError as error:
        faults = unknown_fields(factory, len(args), fields, error)
        if not faults:
            raise
        raise FieldError("", faults) from error


def check_booleans(factory: object, fields: Mapping[str, object]) -> None:
    """Raise FieldError for a boolean in place of a number, which Python would accept."""
    booleans = [key for key, value in fields.items() if isinstance(value, bool)]
    defaults = {key: _default(factory, key) for key in booleans}
    numbers = [key for key, default in defaults.items() if type(default) in (int, float)]
    if numbers:
        raise FieldError("", [(key, f"must be a number, found {fields[key]}") for key in numbers])


def unknown_fields(
    factory: object, num_args: int, fields: Mapping[str, object], error: TypeError
) -> list[tuple[str, str]]:
    """Return a fault for each field that a class or function lacks, after a call that raised."""
    if "unexpected keyword argument" not in str(error) or not callable(factory):
        return []
    known = list(signature(factory).parameters)[num_args:]
    wrong = [key for key in fields if key not in known]
    return [(key, unknown(f"there is no field '{key}'", key, known)) for key in wrong]


def _default(factory: Any, key: str) -> object:  # Any: a class or function
    """Return the default value of a parameter, None if it has none."""
    try:
        return signature(factory).parameters[key].default
    except (ValueError, TypeError, KeyError):  # it is written in C, or has no such parameter
        return None


def _booleans_as_numbers(name: str, given: object, result: object) -> list[tuple[str, str]]:
    """Return a fault for each boolean that pydantic has turned into a number."""
    if isinstance(given, bool):
        if isinstance(result, bool) or not isinstance(result, int | float):
            return []
        rule = "must be a whole number" if isinstance(result, int) else "must be a number"
        return [(name, f"{rule}, found {given}")]
    if isinstance(given, list | tuple) and isinstance(result, list | tuple):
        pairs = [(str(index), *pair) for index, pair in enumerate(zip(given, result, strict=False))]
    elif isinstance(given, Mapping) and isinstance(result, Mapping):
        pairs = [(str(key), value, result.get(key)) for key, value in given.items()]
    else:
        return []
    return [fault for key, *pair in pairs for fault in _booleans_as_numbers(f"{name}.{key}", *pair)]


def _is_union(annotation: Any) -> bool:  # Any: any annotation
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    members = [member for member in get_args(annotation) if member is not NoneType]
    return get_origin(annotation) in (Union, UnionType) and len(members) > 1


def _by_one_member(errors: list[ErrorDetails], unions: list[str]) -> list[ErrorDetails]:
    """Keep, for a field with a union type, the errors of the first member whose type fits.

    Pydantic lists the errors of all members, each with the member's name in its `loc`. If no type
    fits, they are merged into one.
    """
    members: dict[str | int, dict[str | int, list[ErrorDetails]]] = {}
    for details in errors:
        match details["loc"]:
            case (field, member, *rest) if field in unions:
                member_errors = members.setdefault(field, {}).setdefault(member, [])
                member_errors.append({**details, "loc": (field, *rest)})
    chosen: list[ErrorDetails] = [
        details for details in errors if len(details["loc"]) < 2 or details["loc"][0] not in unions
    ]
    for field, by_member in members.items():
        fitting = [errors for errors in by_member.values() if not _of_another_kind(errors)]
        if fitting:
            chosen += fitting[0]
            continue
        first, *others = (errors[0] for errors in by_member.values())
        kinds = [_rule(details).removeprefix("must be ") for details in (first, *others)]
        rule = f"must be {' or '.join(dict.fromkeys(kinds))}"
        chosen.append({**first, "type": "union", "loc": (field,), "msg": rule})
    return chosen


def _of_another_kind(errors: list[ErrorDetails]) -> bool:
    kinds = ("_type", "_parsing", "literal_error")
    return any(len(details["loc"]) == 1 and details["type"].endswith(kinds) for details in errors)


def _rule(details: ErrorDetails) -> str:
    context = details.get("ctx", {}).items()
    shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in context}
    return RULES.get(details["type"], details["msg"]).format_map(shown)


def _fault(details: ErrorDetails, defaults: Mapping[str, object]) -> tuple[str, str]:
    field = ".".join(str(part) for part in details["loc"])
    context = details.get("ctx", {})
    match details["type"]:
        case "missing":
            return field, "is required"
        case "unexpected_keyword_argument":
            return field, unknown(f"there is no field '{field}'", field, [*defaults])
        case "value_error" if isinstance(context.get("error"), Contradiction):
            contradiction = context["error"]
            return contradiction.field, str(contradiction)
        case "greater_than" if isinstance(defaults.get(field), int | float):
            rule = f"{_rule(details)}, such as {defaults[field]}"
            return field, f"{rule}, found {details['input']!r}"
        case "is_instance_of" if context.get("class") == "Sequence":
            return field, f"must be a list, found {details['input']!r}"
        case _:
            return field, f"{_rule(details)}, found {details['input']!r}"


def _too_many(names: list[str], places: list[str]) -> str:
    if places:
        return f"takes at most {len(places)} values without a name: {', '.join(places)}"
    return unknown("takes no values without a name", "", names) if names else "takes no values"
