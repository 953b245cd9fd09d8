"""Whether a run has learned anything: more than what a guess without the inputs comes to."""

from collections.abc import Mapping, Sequence

from gradsurg.tasks.base import Data, Task

ALMOST = 0.99  # of the loss of the best constant guess: what is not below it is no better
NEAR = 0.1  # of the way from chance to all right: a network's accuracy before training varies so


def learned_nothing(
    task: Task, data: Data, outcome: Mapping[str, object], rows: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """What shows that a finished run has learned nothing; empty if it has learned something.

    `outcome` are its metrics at the end, `rows` what it logged. A task that knows no chance is
    judged by its losses: whether none was below the first one that was logged.
    """
    train, test = task.chance(data.train_targets), task.chance(data.test_targets)
    if train is None or test is None:
        return _never_below(outcome, rows)
    loss = _number(outcome, "train/loss")
    if loss is None or loss < ALMOST * train.loss:
        return {}
    for part, chance in (("train", train), ("test", test)):
        reached = _number(outcome, f"{part}/{chance.metric}")
        if reached is None or reached > chance.value + NEAR * (chance.best - chance.value):
            return {}
    return {"metric": f"test/{test.metric}", "beside": test.value, "what": test.description}


def _never_below(
    outcome: Mapping[str, object], rows: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    found = [_number(row, "train/loss") for row in [*rows, outcome]]
    losses = [loss for loss in found if loss is not None]
    if len(losses) < 3 or len(losses) < len(found) or min(losses[1:]) < losses[0]:
        return {}
    what = f"the first one that was logged, at step {rows[0]['step']}, was"
    return {"metric": "train/loss", "beside": losses[0], "what": what}


def _number(found: Mapping[str, object], key: str) -> float | None:
    value = found.get(key)
    return float(value) if isinstance(value, int | float) else None
