"""The optimizer that a config asks for: one of torch.optim, with its own fields."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradsurg.config.make import ERRORS, Config, called, chosen, sentence
from gradsurg.config.settings import Settings
from gradsurg.plugins.fields import FieldError

MakeOptimizer = Callable[[nn.Module], Optimizer]

REFUSED = {
    "LBFGS": "needs a closure that computes the loss again, several times a step",
    "SparseAdam": "takes sparse gradients alone, and those of the models are dense",
}


def optimizer_config(config: Config, settings: Settings | None) -> dict[str, object]:
    """Its name and its fields, the short key `lr` before its own."""
    fields = dict(config["optimizer"])
    if settings is not None and settings.lr is not None:
        fields["lr"] = settings.lr
    return fields


def optimizer_maker(config: Config, settings: Settings | None, bare: bool = False) -> MakeOptimizer:
    """Makes the optimizer of a model, and raises what is wrong with the config then.

    One that is `bare` has looked at its fields and has taken no parameters: with the first that an
    optimizer takes PyTorch imports its compiler, which is more than a second.
    """

    def make(model: nn.Module) -> Optimizer:
        fields = optimizer_config(config, settings)
        name = str(fields.pop("name", ""))
        kinds = [key for key, kind in vars(torch.optim).items() if _is_optimizer(kind)]
        chosen(name, kinds, REFUSED, "torch.optim")
        kind = getattr(torch.optim, name)
        kind = _bare(kind) if bare else kind
        try:
            made = called(kind, (model.parameters(),), fields)
        except FieldError:
            raise
        except ERRORS as error:
            guilty = _guilty(kind, model, fields)
            if guilty:
                faults = [
                    (key, f"{name} refuses it: {text}, found {fields[key]!r}")
                    for key, text in guilty.items()
                ]
                raise FieldError("", faults) from error
            shown = ", ".join(f"{key}={value}" for key, value in fields.items())
            raise ValueError(f"{name}({shown}) is refused: {sentence(error)}") from error
        assert isinstance(made, Optimizer)
        return made

    return make


class _NotNeeded(Exception):
    """Stops an optimizer that takes parameters."""


class _Nothing:
    def __iter__(self) -> Iterator[nn.Parameter]:
        raise _NotNeeded


def _bare(kind: type[Optimizer]) -> Callable[..., Optimizer]:
    def make(params: object, **fields: Any) -> Optimizer:  # Any: as a user wrote them
        made = kind.__new__(kind)
        # Every optimizer looks at its fields first, and then at its parameters.
        with suppress(_NotNeeded):
            made.__init__(_Nothing(), **fields)
        made.param_groups = [{"params": [], **made.defaults}]
        return made

    vars(make)["__signature__"] = inspect.signature(kind)
    return make


def _guilty(
    kind: Callable[..., Optimizer], model: nn.Module, fields: dict[str, object]
) -> dict[str, str]:
    """What is said of each wrong field: the one without which it is well, or those wrong alone."""

    def refusal(given: dict[str, object]) -> str:
        try:
            kind(model.parameters(), **given)
        except TypeError:  # it says which operation failed, and not why
            return "it takes another type"
        except ERRORS as error:
            return sentence(error)
        return ""

    without = [key for key in fields if not refusal({k: v for k, v in fields.items() if k != key})]
    if len(without) == 1:
        return {without[0]: refusal(fields)}
    alone = {key: refusal({key: value}) for key, value in fields.items()}
    # What is said without any field is due to the model, as that Muon takes matrices only.
    return {key: text for key, text in alone.items() if text and text != refusal({})}


def _is_optimizer(kind: object) -> bool:
    """Whether the training loop can use it."""
    if not isinstance(kind, type) or not issubclass(kind, Optimizer) or kind is Optimizer:
        return False
    return kind.__name__ not in REFUSED
