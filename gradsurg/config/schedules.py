"""The learning rate's schedule that a config asks for: one of torch.optim.lr_scheduler."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from gradsurg.config.make import ERRORS, called, chosen, sentence
from gradsurg.plugins.fields import FieldError

MakeSchedule = Callable[[Optimizer], LRScheduler | None]

CONSTANT = "constant"
REFUSED = {
    "LambdaLR": "takes functions, which a config cannot hold",
    "MultiplicativeLR": "takes functions, which a config cannot hold",
    "ReduceLROnPlateau": "looks at a metric, and steps alone are counted here",
}
LENGTHS = ("T_max", "total_iters", "total_steps")
"""Fields that count the steps to the end: null is as many as there are."""
HIGHEST = "max_lr"
"""The field that is a learning rate of its own: null is the optimizer's."""
WALKED = 10_000  # steps that are tried before anything is trained


def schedule_maker(config: Mapping[str, Any], steps: int) -> MakeSchedule:
    """Makes the schedule of an optimizer over a run of so many steps, None for `constant`.

    Raises what is wrong with the config then. (Any: what a YAML file can hold.)
    """
    return lambda optimizer: (
        None if config.get("name") == CONSTANT else _made(config, optimizer, steps)
    )


def walk(schedule: LRScheduler | None, steps: int) -> None:
    """Go through a schedule, up to 10000 steps: raises ValueError where a run would have failed."""
    if schedule is None:
        return
    with warnings.catch_warnings():
        # No step of the optimizer is made here, which is what PyTorch would warn of.
        warnings.simplefilter("ignore", UserWarning)
        for step in range(min(steps, WALKED)):
            rates = [float(rate) for rate in schedule.get_last_lr()]
            if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
                raise ValueError(f"gives the learning rate {rates[0]:g} at step {step}")
            try:
                schedule.step()
            except ERRORS as error:
                raise ValueError(f"fails at step {step + 1}: {sentence(error)}") from error


def _made(config: Mapping[str, Any], optimizer: Optimizer, steps: int) -> LRScheduler:
    fields = dict(config)
    name = str(fields.pop("name", ""))
    kinds = [key for key in lr_scheduler.__all__ if key not in (*REFUSED, "LRScheduler")]
    chosen(name, [CONSTANT, *kinds], REFUSED, "torch.optim.lr_scheduler")
    kind = getattr(lr_scheduler, name)
    if "schedulers" in fields:
        fields["schedulers"] = _parts(fields, optimizer, steps)
    for key, value in fields.items():
        if value is None and key in LENGTHS:
            fields[key] = steps
        elif value is None and key == HIGHEST:
            fields[key] = [group["lr"] for group in optimizer.param_groups]
    try:
        # Its parts have the optimizer already.
        made = called(kind, () if kind is lr_scheduler.ChainedScheduler else (optimizer,), fields)
    except FieldError:
        raise
    except ERRORS as error:
        shown = ", ".join(f"{key}={value}" for key, value in config.items() if key != "name")
        raise ValueError(f"{name}({shown}) is refused: {sentence(error)}") from error
    assert isinstance(made, LRScheduler)
    return made


def _parts(fields: Mapping[str, Any], optimizer: Optimizer, steps: int) -> list[LRScheduler]:
    """The schedules that one is made of; of a sequence each ends where the next begins."""
    given = fields["schedulers"]
    if not isinstance(given, Sequence) or not all(isinstance(part, Mapping) for part in given):
        raise FieldError("", [("schedulers", f"must be a list of mappings, found {given!r}")])
    lengths = [steps] * len(given)
    if "milestones" in fields:
        lengths = _lengths(fields["milestones"], len(given), steps)
    return [_made(part, optimizer, length) for part, length in zip(given, lengths, strict=True)]


def _lengths(milestones: Any, count: int, steps: int) -> list[int]:  # Any: as a user wrote it
    """The steps of each part between its milestones."""
    whole = isinstance(milestones, list) and all(type(mark) is int for mark in milestones)
    marks = [0, *milestones, steps] if whole else []
    lengths = [end - begin for begin, end in pairwise(marks)]
    if len(lengths) != count or min(lengths) < 1:
        rule = f"must be {count - 1} rising numbers of steps between 0 and {steps}"
        raise FieldError("", [("milestones", f"{rule}, found {milestones!r}")])
    return lengths
