"""The optimizer and the schedule of a run, made with the model and the number of steps."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from itertools import pairwise
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from gradsurg.experiment.making import call_of, fields_of, user_code
from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.messages import one_line
from gradsurg.plugins.registry import SEQUENCE, is_own, name_of

Node = Mapping[str, Any]  # Any: what YAML can hold
REFUSED = {
    "LBFGS": "needs a closure that computes the loss again, several times a step",
    "SparseAdam": "takes sparse gradients alone, and the gradients of the models are dense",
    "LambdaLR": "takes functions, which a config cannot hold",
    "MultiplicativeLR": "takes functions, which a config cannot hold",
    "ReduceLROnPlateau": "looks at a metric, and steps alone are counted here",
    "ChainedScheduler": "takes schedules that are made already, which a config cannot hold",
    "SequentialLR": "takes schedules that are made already; gradsurg.sequence makes them",
}
LENGTHS = ("T_max", "total_iters", "total_steps")
"""Fields that count the steps to the end: null stands for the number of steps of the run."""
HIGHEST = "max_lr"
"""The field that is a learning rate of its own: null stands for the optimizer's."""
MAX_CHECKED_STEPS = 10_000


def sequence(
    optimizer: Optimizer,
    schedulers: Sequence[Callable[[Optimizer], LRScheduler]],
    milestones: Sequence[int],
) -> SequentialLR:
    """Return a `torch.optim.lr_scheduler.SequentialLR` of `schedulers`.

    Each scheduler is a function of the optimizer, such as Hydra makes from `_partial_: true`. It
    ends at its milestone, a number of steps.
    """
    return SequentialLR(optimizer, [make(optimizer) for make in schedulers], [*milestones])


def make_optimizer(node: Node, model: nn.Module) -> Optimizer:
    """Make the optimizer of a model. Raises FieldError for an unknown field, and ValueError with
    PyTorch's own reason on one line.
    """
    optimizer = _called(node, (model.parameters(),))
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"must make a torch.optim.Optimizer, found {optimizer!r}")
    return optimizer


def make_schedule(node: Node, steps: int, optimizer: Optimizer) -> LRScheduler | None:
    """Make the schedule of an optimizer over a run of `steps` steps; None for an empty node.

    Raises as `make_optimizer`.
    """
    if not node:
        return None
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = _called(_filled(node, steps, rates), (optimizer,))
    if not isinstance(schedule, LRScheduler):
        raise TypeError(f"must make a torch.optim.lr_scheduler.LRScheduler, found {schedule!r}")
    return schedule


def check_learning_rates(schedule: LRScheduler | None, steps: int) -> None:
    """Step through a schedule, up to 10000 steps; ValueError where a run would fail."""
    if schedule is None:
        return
    with warnings.catch_warnings():
        # PyTorch warns that the optimizer has not made a step, which is intended.
        warnings.simplefilter("ignore", UserWarning)
        for step in range(min(steps, MAX_CHECKED_STEPS)):
            rates = [float(rate) for rate in schedule.get_last_lr()]
            if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
                raise ValueError(f"gives the learning rate {rates[0]:g} at step {step}")
            try:
                schedule.step()
            except Exception as error:  # PyTorch's own checks raise any class
                raise ValueError(f"fails at step {step + 1}: {one_line(error)}") from error


def _called(node: Node, args: tuple[object, ...]) -> object:
    """Call the class of a node with these arguments before its fields."""
    refused = node.get("_target_") != SEQUENCE and REFUSED.get(name_of(node))
    if refused:
        raise ValueError(f"{name_of(node)} {refused}")
    factory, fields = call_of(node)
    try:
        with user_code(node):
            return call_with_fields(factory, args, fields)
    except FieldError:
        raise
    except Exception as error:  # PyTorch's own checks raise any class
        reason = one_line(error)
        if not is_own(node):
            raise
        if isinstance(error, TypeError):  # a comparison of a text or null with a number
            defaults = {key: item.default for key, item in signature(factory).parameters.items()}
            numbers = [key for key in fields if not isinstance(defaults[key], str | None)]
            wrong = [key for key in numbers if isinstance(fields[key], str | None)]
            texts = [f"{key}: must be a number, found {fields[key]!r}" for key in wrong]
            reason = "; ".join(texts) or reason
        shown = ", ".join(f"{key}={value}" for key, value in fields_of(node).items())
        raise ValueError(f"{name_of(node)}({shown}) is refused: {reason}") from error


def _filled(node: Node, steps: int, rates: Sequence[float]) -> dict[str, Any]:  # Any: as above
    """Return a node with a value for each null of `LENGTHS` and `HIGHEST`."""
    filled = {**node}
    for key, value in node.items():
        if value is None and key in LENGTHS:
            filled[key] = steps
        if value is None and key == HIGHEST:
            filled[key] = [*rates]
    if "schedulers" in node:
        filled["schedulers"] = _filled_parts(node, steps, rates)
    return filled


def _filled_parts(node: Node, steps: int, rates: Sequence[float]) -> list[dict[str, Any]]:
    """Return the nodes of a combined schedule; in a sequence each ends where the next begins."""
    parts, marks = node["schedulers"], node.get("milestones")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise FieldError("", [("schedulers", f"must be a list of mappings, found {parts!r}")])
    lengths = [steps] * len(parts)
    if "milestones" in node:
        lengths = []
        if isinstance(marks, list) and all(type(mark) is int for mark in marks):
            lengths = [end - begin for begin, end in pairwise([0, *marks, steps])]
        if len(lengths) != len(parts) or min(lengths) < 1:
            rule = f"must be {len(parts) - 1} rising numbers of steps between 0 and {steps}"
            raise FieldError("", [("milestones", f"{rule}, found {marks!r}")])
    pairs = zip(parts, lengths, strict=True)
    return [_filled(part, length, rates) for part, length in pairs]
