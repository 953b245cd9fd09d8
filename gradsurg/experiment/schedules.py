"""Create a learning rate schedule of torch.optim.lr_scheduler from its name and its fields."""

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from gradsurg.experiment.optimizers import create
from gradsurg.plugins.fields import FieldError
from gradsurg.plugins.messages import one_line

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


def make_schedule(
    config: Mapping[str, Any], steps: int, optimizer: Optimizer
) -> LRScheduler | None:
    """Create the schedule of an optimizer over a run of `steps` steps; None for `constant`.

    Raises as `optimizers.create`. (Any: what a YAML file can hold.)
    """
    if config.get("name") != CONSTANT:
        return _schedule(config, optimizer, steps)
    rule = f"is not a field here: {CONSTANT} has none"
    if faults := [(key, rule) for key in config if key != "name"]:
        raise FieldError("", faults)
    return None


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
    """Create a schedule whose fields of `LENGTHS` and `HIGHEST` may be null."""
    empty = [key for key, value in config.items() if value is None]
    replaced: dict[str, object] = {key: steps for key in empty if key in LENGTHS}
    if HIGHEST in empty:
        replaced[HIGHEST] = [group["lr"] for group in optimizer.param_groups]
    if "schedulers" in config:
        replaced["schedulers"] = _parts(config, optimizer, steps)
    choices = [CONSTANT, *lr_scheduler.__all__]
    choices.remove("LRScheduler")
    # The parts of a ChainedScheduler have the optimizer already.
    args = () if config.get("name") == "ChainedScheduler" else (optimizer,)
    schedule = create(lr_scheduler, choices, REFUSED, args, config, replaced)
    assert isinstance(schedule, LRScheduler)
    return schedule


def _parts(fields: Mapping[str, Any], optimizer: Optimizer, steps: int) -> list[LRScheduler]:
    """Create the schedules of a combined one; in a sequence each ends where the next begins."""
    configs, marks = fields["schedulers"], fields.get("milestones")
    if not isinstance(configs, Sequence) or not all(isinstance(part, Mapping) for part in configs):
        raise FieldError("", [("schedulers", f"must be a list of mappings, found {configs!r}")])
    lengths = [steps] * len(configs)
    if "milestones" in fields:
        lengths = []
        if isinstance(marks, list) and all(type(mark) is int for mark in marks):
            lengths = [end - begin for begin, end in pairwise([0, *marks, steps])]
        if len(lengths) != len(configs) or min(lengths) < 1:
            rule = f"must be {len(configs) - 1} rising numbers of steps between 0 and {steps}"
            raise FieldError("", [("milestones", f"{rule}, found {marks!r}")])
    parts = zip(configs, lengths, strict=True)
    return [_schedule(part, optimizer, length) for part, length in parts]
