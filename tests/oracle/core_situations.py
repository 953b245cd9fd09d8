"""Situations with code of their own: optimizers, hooks of others, numbers, `gs.hook`, vmap."""

import gc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

import gradsurg as gs
from tests.oracle.core_changes import Setup, of
from tests.oracle.core_models import Twice
from tests.oracle.core_outcome import Cell, Observed
from tests.oracle.core_sites import KINDS
from tests.oracle.core_training import LOSS

Run = Callable[[Observed], None]
RUNS: list[Run] = []


def situation(run: Run) -> Run:
    RUNS.append(run)
    return run


def cells() -> Iterator[Cell]:
    """Yield the situations."""
    for run in RUNS:
        yield Cell("situations", "plain", run.__name__.replace("_", " "), run)


@situation
def two_optimizers(observed: Observed) -> None:
    setup = Setup(observed)
    params = list(setup.model.parameters())
    parts = [SGD(params[:2], 0.1), torch.optim.AdamW(params[2:], 0.01)]
    surgery = gs.Surgery(
        gs.Intervention(gs.ClipGlobalNorm(0.1), at=gs.Parameters("lin_a.*", stage="step")),
        gs.Intervention(gs.ClipGlobalNorm(0.1), at=gs.Parameters("lin_b.*", stage="step")),
        gs.Intervention(gs.Cautious(), at=gs.Updates()),
        gs.Intervention(gs.Momentum(0.5), at=gs.Parameters("lin_?.bias"), when=gs.Steps(1)),
    )
    with surgery.attach(setup.model, parts, clock=parts[1]) as live:
        for number, (x, y) in enumerate(islice(setup.source, 4)):
            LOSS(setup.model(x), y).backward()
            for part in parts[number % 2 :]:
                part.step()
                part.zero_grad()
    observed.take(surgery, live)


@situation
def nothing_matches(observed: Observed) -> None:
    """A LookupError with the nearest name, on attach or after the first forward."""
    selectors = {
        "lin_a.weight": gs.Parameters("lin_a.wieght"),
        "lin_b": gs.Outputs("lin_bb"),
        "ReLU": gs.Inputs(types="RelU"),
        "Relu": gs.Nodes("Rely"),
        "act_a": gs.Uses("act_aa"),
        "lin_c": gs.Activations("lin_cc"),
    }
    for name, at in selectors.items():
        setup = Setup(observed)
        try:
            with of(gs.Clip(), at=at).attach(setup.model, setup.optimizer):
                setup.steps(1)
        except LookupError as error:
            observed.note(name, name in str(error))
        setup.steps(1)
    observed.outcome.acts = True


@situation
def lbfgs(observed: Observed) -> None:
    setup = Setup(observed)
    optimizer = LBFGS(setup.model.parameters(), max_iter=3)
    surgery = gs.Surgery(
        gs.Intervention(gs.Clip(0.1)),
        gs.Intervention(gs.Momentum(0.5), at=gs.Parameters(stage="step")),
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = LOSS(setup.model(x), y)
        loss.backward()
        return loss

    with surgery.attach(setup.model, optimizer) as live:
        for _ in range(3):
            x, y = next(setup.source)
            optimizer.step(closure)
    observed.take(surgery, live)


@situation
def start_bind_close(observed: Observed) -> None:
    setup = Setup(observed)
    surgery = of(gs.ClipGlobalNorm(0.1), gs.AddNoise(), at=gs.Parameters(stage="step"))
    live = surgery.start(setup.model)
    setup.steps(1)
    live.bind(setup.optimizer)
    setup.steps(1)
    setup.optimizer = SGD(setup.model.parameters(), 0.05)
    live.bind(setup.optimizer)
    setup.steps(2)
    live.close()
    observed.take(surgery, live)


@situation
def never_closed(observed: Observed) -> None:
    setup = Setup(observed)
    live = of(gs.Clip(0.1)).attach(setup.model, setup.optimizer)
    setup.steps(1)
    del live
    gc.collect()
    setup.steps(1)
    observed.outcome.acts = True


@situation
def before_step_and_tick(observed: Observed) -> None:
    setup = Setup(observed)
    surgery = of(gs.ClipNorm(0.05), gs.Momentum(0.5), at=gs.Parameters(stage="step"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        for x, y in islice(setup.source, 3):
            setup.optimizer.zero_grad()
            LOSS(setup.model(x), y).backward()
            live.before_step()
            nn.utils.clip_grad_norm_(setup.model.parameters(), 0.1)
            setup.optimizer.step()
    observed.take(surgery, live)


@situation
def ticks_without_an_optimizer(observed: Observed) -> None:
    setup = Setup(observed)
    surgery = of(gs.AddNoise(), when=gs.Epochs(start=1) | gs.Every(2))
    with surgery.attach(setup.model) as live:
        for _ in range(4):
            setup.steps(1)
            live.tick()
            live.next_epoch()
    observed.take(surgery, live)


@situation
def numbers_between(observed: Observed) -> None:
    setup = Setup(observed)
    surgery = of(gs.Clip(0.01), gs.Scale(2.0), at=gs.Parameters("*.weight"), when=gs.Every(2))
    with surgery.attach(setup.model, setup.optimizer, effects_every=2) as live:
        for number in range(4):
            setup.steps(1)
            observed.note(f"numbers {number}", live.effects.numbers())
    observed.note("quantiles", live.effects.quantiles("clip", [0.1, 0.5, 0.9]))
    observed.take(surgery, live)


@situation
def gradients_that_are_not_finite(observed: Observed) -> None:
    setup = Setup(observed)
    surgery = gs.Surgery(
        gs.Intervention(gs.Sanitize(), at=gs.Outputs("lin_b")),
        gs.Intervention(gs.SkipUpdate(), at=gs.Parameters(stage="step")),
    )
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.steps(1)
        setup.steps(1, call=lambda x: setup.model(x) * float("nan"))
        setup.steps(1)
    observed.note("skipped", live.skipped_steps)
    observed.take(surgery, live)


@situation
def a_transform_that_makes_infinities(observed: Observed) -> None:
    setup = Setup(observed)
    surgery = of(lambda grad: grad / 0.0, at=gs.Parameters("lin_a.*"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.steps(2)
    first = live.effects.first_nonfinite
    observed.note("first", None if first is None else list(first))
    observed.take(surgery, live)


@situation
def hooks_of_others(observed: Observed) -> None:
    """The user's hooks, before and after those of a surgery, see the same values as ever."""
    setup = Setup(observed)
    seen: dict[str, list[Tensor]] = {}

    def watch(when: str) -> list[Any]:
        def note(name: str, *tensors: Tensor | None) -> None:
            given = (tensor for tensor in tensors if tensor is not None)
            seen.setdefault(f"{when} {name}", []).extend(each.detach().clone() for each in given)

        module, param = setup.model.lin_b, setup.model.lin_b.weight
        return [
            module.register_full_backward_hook(
                lambda module, ins, outs: note("module", *ins, *outs)
            ),
            module.register_forward_hook(lambda module, args, out: note("output", *args, out)),
            param.register_hook(lambda grad: note("gradient", grad)),
            param.register_post_accumulate_grad_hook(lambda param: note("sum", param.grad)),
            setup.optimizer.register_step_pre_hook(lambda *_: note("step", param.grad)),
            setup.optimizer.register_step_post_hook(lambda *_: note("after", param)),
        ]

    kinds = ("Parameters backward", "Parameters accumulated", "Parameters step", "Outputs")
    kinds += ("Inputs branch", "Activations", "Updates", "Weights step", "Group backward_end")
    surgery = gs.Surgery(*(gs.Intervention(gs.Scale(0.5), at=KINDS[kind]()) for kind in kinds))
    handles = watch("before")
    with surgery.attach(setup.model, setup.optimizer) as live:
        handles += watch("inside")
        setup.steps(2)
    for name, tensors in seen.items():
        observed.note(name, tensors)
    for handle in handles:
        handle.remove()
    observed.take(surgery, live)


@situation
def hook_of_a_tensor(observed: Observed) -> None:
    _hook(observed, lambda model, h, loss: h, gs.Clip(0.001))


@situation
def hook_of_a_tensor_with_noise(observed: Observed) -> None:
    _hook(observed, lambda model, h, loss: h, gs.AddNoise(sigma=0.1))


@situation
def hook_of_a_node(observed: Observed) -> None:
    _hook(observed, lambda model, h, loss: loss.grad_fn, gs.Scale(3.0))


@situation
def hook_of_a_parameter_with_a_state(observed: Observed) -> None:
    _hook(observed, lambda model, h, loss: model.lin_a.weight, gs.Momentum(0.9))


def _hook(observed: Observed, place: Callable[..., Any], transform: Any) -> None:
    setup = Setup(observed)
    for x, y in islice(setup.source, 3):
        h = setup.model.features(x)
        loss = LOSS(setup.model.lin_c(h), y)
        setup.optimizer.zero_grad()
        with gs.hook(place(setup.model, h, loss), transform):
            loss.backward()
        setup.optimizer.step()
    observed.outcome.acts = True


@situation
def captured_outputs(observed: Observed) -> None:
    setup = Setup(observed, Twice())
    kept: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda module, args, out: kept.append(out))
        for module in (setup.model.lin_a, setup.model.lin_b)
    ]
    surgery = of(gs.Clip(0.01), at=gs.Captured("lin_*"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        for x, y in islice(setup.source, 3):
            kept.clear()
            loss = LOSS(setup.model(x), y)
            observed.note(f"step {live.step}", list(torch.autograd.grad(loss, kept)))
            setup.optimizer.step()
    observed.take(surgery, live)
    for handle in handles:
        handle.remove()


@situation
def batched_gradients(observed: Observed) -> None:
    setup = Setup(observed)
    surgery = of(gs.Clip(0.1), gs.ScaleBySign(1.0, 0.5), at=gs.Outputs("*"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        out = setup.model(next(setup.source)[0])
        rows = torch.eye(out.numel()).reshape(-1, *out.shape)
        grads = torch.autograd.grad(
            out, list(setup.model.parameters()), rows, is_grads_batched=True
        )
    observed.note("grads", list(grads))
    observed.outcome.acts = True
    observed.take(surgery, live)


@situation
def vmap_of_grad(observed: Observed) -> None:
    setup = Setup(observed)
    params = {name: param.detach() for name, param in setup.model.named_parameters()}
    x, y = next(setup.source)

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return LOSS(torch.func.functional_call(setup.model, params, (x[None],)), y[None])

    surgery = of(gs.Clip(0.1), at=gs.Outputs("*"))
    with surgery.attach(setup.model, setup.optimizer) as live:
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
    observed.note("grads", list(grads.values()))
    observed.outcome.acts = True
    observed.take(surgery, live)


@situation
def a_step_that_trains_a_part(observed: Observed) -> None:
    """Parameters and modules that some steps do not reach."""
    setup = Setup(observed)
    kinds = ("Parameters backward", "Parameters step", "Outputs", "Group backward_end", "Updates")
    surgery = gs.Surgery(*(gs.Intervention(gs.Momentum(), at=KINDS[kind]()) for kind in kinds))
    with surgery.attach(setup.model, setup.optimizer) as live:
        setup.steps(1)
        setup.steps(1, call=lambda x: setup.model.lin_b(setup.model.act_a(setup.model.lin_a(x))))
        setup.steps(1)
    observed.take(surgery, live)


@situation
def an_unknown_scaler(observed: Observed) -> None:
    setup = Setup(observed)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    surgery = of(gs.Clip(0.01))
    with surgery.attach(setup.model, setup.optimizer) as live:
        for x, y in islice(setup.source, 2):
            setup.optimizer.zero_grad()
            scaler.scale(LOSS(setup.model(x), y)).backward()
            scaler.step(setup.optimizer)
            scaler.update()
    observed.take(surgery, live)
