"""Create a learning rate schedule of torch.optim.lr_scheduler from its name and its fields."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from gradsurg.plugins.fields import FieldError, call_with_fields
from gradsurg.plugins.messages import one_line
from gradsurg.plugins.registry import check_choice

MakeSchedule = Callable[[Optimizer], LRScheduler | None]

CONSTANT = "constant"
REFUSED = {
    "LambdaLR": "takes functions, which a config cannot hold",
    "MultiplicativeLR": "takes functions, which a config cannot hold",
    "ReduceLROnPlateau": "looks at a metric, and steps alone are counted here",
}
LENGTHS = ("T_max", "total_iters", "total_steps")
"""Fields that count the steps to the end: null stands for the number of steps of the run."""
HIGHEST = "max_lr"
"""The field that is a learning rate of its own: null stands for the optimizer's."""
MAX_CHECKED_STEPS = 10_000


def schedule_maker(config: Mapping[str, Any], steps: int) -> MakeSchedule:
    """Return a function that creates the schedule of an optimizer over a run of `steps` steps.

    The function returns None for `constant`, and raises if the name or a field is wrong. (Any:
    what a YAML file can hold.)
    """

    def make(optimizer: Optimizer) -> LRScheduler | None:
        if config.get("name") != CONSTANT:
            return _schedule(config, optimizer, steps)
        unknown = [key for key in config if key != "name"]
        if unknown:
            rule = f"is not a field here: {CONSTANT} has none"
            raise FieldError("", [(key, rule) for key in unknown])
        return None

    return make


def check_learning_rates(schedule: LRScheduler | None, steps: int) -> None:
    """Step through a schedule, up to 10000 steps; ValueError where a run would fail."""
    if schedule is None:
        return
    with warnings.catch_warnings():
        # PyTorch warns that the optimizer has not made a step, which is meant.
        warnings.simplefilter("ignore", UserWarning)
        for step in range(min(steps, MAX_CHECKED_STEPS)):
            rates = [float(rate) for rate in schedule.get_last_lr()]
            if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
                raise ValueError(f"gives the learning rate {rates[0]:g} at step {step}")
            try:
                schedule.step()
            except Exception as error:  # PyTorch's own checks raise any class
                raise ValueError(f"fails at step {step + 1}: {one_line(error)}") from error


def _schedule(config: Mapping[str, Any], optimizer: Optimizer, steps: int) -> LRScheduler:
    fields = dict(config)
    name = str(fields.pop("name", ""))
    names = [key for key in lr_scheduler.__all__ if key not in (*REFUSED, "LRScheduler")]
    check_choice(name, [CONSTANT, *names], REFUSED, "torch.optim.lr_scheduler")
    schedule_class = getattr(lr_scheduler, name)
    if "schedulers" in fields:
        fields["schedulers"] = _parts(fields, optimizer, steps)
    for key, value in fields.items():
        if value is None and key in LENGTHS:
            fields[key] = steps
        elif value is None and key == HIGHEST:
            fields[key] = [group["lr"] for group in optimizer.param_groups]
    # The parts of a ChainedScheduler have the optimizer already.
    args = () if schedule_class is lr_scheduler.ChainedScheduler else (optimizer,)
    try:
        schedule = call_with_fields(schedule_class, args, fields)
    except FieldError:
        raise
    except Exception as error:  # PyTorch's own checks raise any class
        shown = ", ".join(f"{key}={value}" for key, value in config.items() if key != "name")
        raise ValueError(f"{name}({shown}) is refused: {one_line(error)}") from error
    assert isinstance(schedule, LRScheduler)
    return schedule


def _parts(fields: Mapping[str, Any], optimizer: Optimizer, steps: int) -> list[LRScheduler]:
    """Create the schedules of a combined one; in a sequence each ends where the next begins."""
    configs = fields["schedulers"]
    if not isinstance(configs, Sequence) or not all(isinstance(part, Mapping) for part in configs):
        raise FieldError("", [("schedulers", f"must be a list of mappings, found {configs!r}")])
    lengths = [steps] * len(configs)
    if "milestones" in fields:
        lengths = _lengths(fields["milestones"], len(configs), steps)
    return [
        _schedule(part, optimizer, length) for part, length in zip(configs, lengths, strict=True)
    ]


def _lengths(milestones: Any, count: int, steps: int) -> list[int]:  # Any: as a user wrote it
    """Return the number of steps of each part between the milestones."""
    whole = isinstance(milestones, list) and all(type(mark) is int for mark in milestones)
    marks = [0, *milestones, steps] if whole else []
    lengths = [end - begin for begin, end in pairwise(marks)]
    if len(lengths) != count or min(lengths) < 1:
        rule = f"must be {count - 1} rising numbers of steps between 0 and {steps}"
        raise FieldError("", [("milestones", f"{rule}, found {milestones!r}")])
    return lengths
