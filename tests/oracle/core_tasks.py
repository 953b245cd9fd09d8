"""Several losses: aggregators, engines, groups of parameters, and transforms beside them."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

import gradsurg as gs
from tests.oracle.core_cells import TRIGGERS, plugins
from tests.oracle.core_models import Heads, batches
from tests.oracle.core_outcome import Cell, Observed
from tests.oracle.core_sites import KINDS
from tests.oracle.core_training import LOSS, STEPS

Losses = dict[str, Tensor]
Make = Callable[[], Any]  # Any: transforms and aggregators, whose base classes may move

AGGREGATORS: dict[str, Make] = {
    "Sum": lambda: gs.Sum(),
    "PCGrad": lambda: gs.PCGrad(),
    "MGDA": lambda: gs.MGDA(),
    "CAGrad": lambda: gs.CAGrad(),
    "UPGrad": lambda: gs.UPGrad(),
    "GradDrop": lambda: gs.GradDrop(),
    "DWA": lambda: gs.DWA(),
    "Random": lambda: gs.Random(),
}
SHARED: dict[str, dict[str, object]] = {
    "whole": {},
    "module": {"granularity": "module"},
    "tensor": {"granularity": "tensor"},
    "patterns": {"granularity": ("lin_a.*", "*")},
    "some": {"pattern": "lin_b.*"},
    "feature": {"engine": "feature", "features": "act_b"},
}
BESIDE: dict[str, Callable[[], list[gs.Intervention]]] = {
    "a clip of each task": lambda: [gs.Intervention(gs.Clip(0.01))],
    "a clip of a task": lambda: [gs.Intervention(gs.Clip(0.01), when=gs.ForTask("task_d"))],
    "noise at outputs": lambda: [gs.Intervention(gs.AddNoise(sigma=0.1), at=gs.Outputs("lin_*"))],
    "a momentum of a task": lambda: [
        gs.Intervention(gs.Momentum(0.9), when=gs.ForTask("task_c")),
    ],
    "a momentum": lambda: [gs.Intervention(gs.Momentum(0.9))],
    "a clip of the step": lambda: [
        gs.Intervention(gs.ClipGlobalNorm(0.1), at=gs.Parameters(stage="step"))
    ],
    "a scale of sums": lambda: [gs.Intervention(gs.Scale(0.5), at=KINDS["Group backward_end"]())],
}


def _backward(live: gs.Live, losses: Losses) -> None:
    live.backward(losses)


def _in_two_passes(live: gs.Live, losses: Losses) -> None:
    first, second = ({name: loss} for name, loss in losses.items())
    live.backward(first, aggregate=False, retain_graph=True)
    live.backward(second)


def _scaled(live: gs.Live, losses: Losses) -> None:
    live.backward(losses, scale=0.25)


def _listed(live: gs.Live, losses: Losses) -> None:
    live.backward(list(losses.values()))


def _one(live: gs.Live, losses: Losses) -> None:
    live.backward({"task_c": losses["task_c"]})


BACKWARDS = {
    "two passes": _in_two_passes,
    "scale=": _scaled,
    "list": _listed,
    "one task": _one,
}


def _train(
    items: Callable[[], list[gs.Intervention]],
    backward: Callable[[gs.Live, Losses], None],
    options: dict[str, object],
    is_scaled: bool,
    observed: Observed,
) -> None:
    model = Heads()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    observed.watch(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if is_scaled else None
    surgery = gs.Surgery(*items(), seed=2)
    source = batches(model)
    with surgery.attach(model, optimizer, scaler=scaler, **options) as live:
        for _ in range(STEPS):
            x, y = next(source)
            out = model(x)
            losses = {"task_c": LOSS(out["task_c"], y), "task_d": LOSS(3 * out["task_d"], 1 - y)}
            optimizer.zero_grad()
            if scaler is None:
                backward(live, losses)
                optimizer.step()
            else:
                backward(live, {name: scaler.scale(loss) for name, loss in losses.items()})
                scaler.step(optimizer)
                scaler.update()
        observed.take(surgery, live)


def _cell(
    column: str,
    detail: str,
    items: Callable[[], list[gs.Intervention]],
    backward: Callable[[gs.Live, Losses], None] = _backward,
    is_scaled: bool = False,
    **options: object,
) -> Cell:
    run = partial(_train, items, backward, options, is_scaled)
    return Cell("SharedParameters", column, detail, run)


def _combined(make: Make, when: Make = lambda: gs.Always(), **fields: Any) -> gs.Intervention:
    return gs.Intervention(make(), at=gs.SharedParameters(**fields), when=when())


def cells() -> Iterator[Cell]:
    """Yield the combinations of several losses."""
    for (name, make), (where, fields) in product(AGGREGATORS.items(), SHARED.items()):
        for column, options in (("plain", {}), ("effects_every=3", {"effects_every": 3})):
            items = partial(lambda make, fields: [_combined(make, **fields)], make, fields)
            yield _cell(column, f"{name}, {where}", items, **options)
    for name, make in AGGREGATORS.items():
        alone = partial(lambda make: [_combined(make)], make)
        for detail, backward in BACKWARDS.items():
            yield _cell("accumulation", f"{name}, {detail}", alone, backward)
        yield _cell("loss scale", name, alone, is_scaled=True)
        yield _cell("shadow", name, alone, shadow=True)
        for when, trigger in TRIGGERS.items():
            timed = partial(lambda make, trigger: [_combined(make, trigger)], make, trigger)
            yield _cell("triggers", f"{name}, {when}", timed)
        for beside, others in BESIDE.items():
            both = partial(lambda make, others: [_combined(make), *others()], make, others)
            yield _cell("two interventions", f"{name}, {beside}", both)
    for beside, others in BESIDE.items():
        yield _cell("two interventions", f"no aggregator, {beside}", others)
    for make in plugins("aggregators"):
        items = partial(lambda make: [_combined(make)], make)
        yield _cell("plain", f"default {make.__name__}", items)
