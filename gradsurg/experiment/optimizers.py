"""Create an optimizer of torch.optim from its name and its fields."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.messages import one_line
from gradsurg.plugins.registry import check_choice

MakeOptimizer = Callable[[nn.Module], Optimizer]

REFUSED = {
    "LBFGS": "needs a closure that computes the loss again, several times a step",
    "SparseAdam": "takes sparse gradients alone, and those of the models are dense",
}


def optimizer_maker(config: Mapping[str, Any], fields_only: bool = False) -> MakeOptimizer:
    """Return a function that creates the optimizer of a model from `name` and its fields.

    The function raises if the name or a field is wrong. With `fields_only` the optimizer has
    checked its fields but holds no parameters: adding the first parameter group imports PyTorch's
    compiler, which takes more than a second. (Any: what a YAML file can hold.)
    """

    def make_optimizer(model: nn.Module) -> Optimizer:
        fields = dict(config)
        name = str(fields.pop("name", ""))
        names = [key for key, value in vars(torch.optim).items() if _is_usable(value)]
        check_choice(name, names, REFUSED, "torch.optim")
        optimizer_class = getattr(torch.optim, name)
        factory = _without_parameters(optimizer_class) if fields_only else optimizer_class
        try:
            optimizer = call_with_fields(factory, (model.parameters(),), fields)
        except FieldError:
            raise
        except Exception as error:  # PyTorch's own checks raise any class
            shown = ", ".join(f"{key}={value}" for key, value in fields.items())
            reason = one_line(error)
            if isinstance(error, TypeError):  # a comparison of a text or None with a number
                wrong = {key: item for key, item in fields.items() if isinstance(item, str | None)}
                texts = [f"{key}: must be a number, found {item!r}" for key, item in wrong.items()]
                reason = "; ".join(texts) or reason
            raise ValueError(f"{name}({shown}) is refused: {reason}") from error
        assert isinstance(optimizer, Optimizer)
        return optimizer

    return make_optimizer


class _ParametersRead(Exception):
    """Raised when an optimizer starts to read its parameters."""


class _UnreadableParameters:
    def __iter__(self) -> Iterator[nn.Parameter]:
        raise _ParametersRead


def _without_parameters(optimizer_class: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a factory of optimizers that check their fields and hold no parameters."""

    def make(params: object, **fields: Any) -> Optimizer:  # Any: as a user wrote them
        optimizer = optimizer_class.__new__(optimizer_class)
        # Every optimizer checks its fields before it reads its parameters.
        with suppress(_ParametersRead):
            optimizer.__init__(_UnreadableParameters(), **fields)
        optimizer.param_groups = [{"params": [], **optimizer.defaults}]
        return optimizer

    vars(make)["__signature__"] = inspect.signature(optimizer_class)
    return make


def _is_usable(value: object) -> bool:
    """Return whether a member of torch.optim is an optimizer that the training loop can use."""
    if not isinstance(value, type) or not issubclass(value, Optimizer) or value is Optimizer:
        return False
    return value.__name__ not in REFUSED
