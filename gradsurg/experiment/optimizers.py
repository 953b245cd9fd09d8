"""Create an optimizer of torch.optim from its name and its fields."""

from collections.abc import Mapping, Sequence
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.messages import one_line
from gradsurg.plugins.registry import check_choice

REFUSED = {
    "LBFGS": "needs a closure that computes the loss again, several times a step",
    "SparseAdam": "takes sparse gradients alone, and those of the models are dense",
}


def make_optimizer(config: Mapping[str, Any], model: nn.Module) -> Optimizer:
    """Create the optimizer of a model from `name` and its fields; raises as `create`.

    (Any: what a YAML file can hold.)
    """
    classes = [key for key, value in vars(torch.optim).items() if isinstance(value, type)]
    classes.remove("Optimizer")
    optimizer = create(torch.optim, classes, REFUSED, (model.parameters(),), config)
    assert isinstance(optimizer, Optimizer)
    return optimizer


def create(
    library: ModuleType,
    choices: Sequence[str],
    refused: Mapping[str, str],
    args: tuple[object, ...],
    config: Mapping[str, Any],
    replaced: Mapping[str, object] | None = None,
) -> object:
    """Create an object of the class `name` of a library, with the other keys of `config` as fields,
    but for those of `replaced`.

    Raises LookupError for a name that is not in `choices`, FieldError for an unknown field, and
    ValueError with PyTorch's own reason on one line. `refused` maps refused names to reasons.
    """
    fields = {**config, **(replaced or {})}
    name = str(fields.pop("name", ""))
    usable = [choice for choice in choices if choice not in refused]
    check_choice(name, usable, refused, library.__name__)
    factory: Any = getattr(library, name, None)  # Any: a class
    try:
        return call_with_fields(factory, args, fields)
    except FieldError:
        raise
    except Exception as error:  # PyTorch's own checks raise any class
        reason = one_line(error)
        if isinstance(error, TypeError):  # a comparison of a text or null with a number
            defaults = {key: item.default for key, item in signature(factory).parameters.items()}
            numbers = [key for key in fields if not isinstance(defaults[key], str | None)]
            wrong = [key for key in numbers if isinstance(fields[key], str | None)]
            texts = [f"{key}: must be a number, found {fields[key]!r}" for key in wrong]
            reason = "; ".join(texts) or reason
        shown = ", ".join(f"{key}={value}" for key, value in config.items() if key != "name")
        raise ValueError(f"{name}({shown}) is refused: {reason}") from error
