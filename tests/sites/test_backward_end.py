"""Stage `backward_end`: all `.grad`s at once, when a backward has ended, and once."""

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsurg as gs
from gradsurg.transforms.base import Transform
from tests.forks import Ranks, in_ranks
from tests.nets import attached, gradients, num_hooks, sgd
from tests.sites.points import TEN, Made, TimesValue, calls_of, recomputed


class Weighted(nn.Module):
    """The sum of a * x, b * y, c * z: each gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))
        self.c = nn.Parameter(torch.zeros(1))

    def forward(self, *values: Any) -> Tensor:
        params = (self.a, self.b, self.c)
        return sum((p * v for p, v in zip(params, values, strict=False)), torch.zeros(1)).sum()


def _grads(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def _at(pattern: str = "*") -> gs.Parameters:
    return gs.Parameters(pattern, stage="backward_end")


CLIP = gs.ClipGlobalNorm(1.0, eps=0.0)
AT_ROOT = "a backward pass has failed, and the group was not transformed"


def test_the_group_is_what_a_backward_reaches_and_an_older_gradient_stays() -> None:
    model = Weighted()
    model.c.grad = torch.tensor([100.0])
    with attached(model, CLIP, _at()) as live:
        model(3.0, 4.0).backward()
        assert _grads(model) == pytest.approx([0.6, 0.8, 100.0])
        model.zero_grad()
        model(3.0, 4.0).backward(inputs=[model.b])
        assert _grads(model) == [None, pytest.approx(1.0), None]
        model(0.0, 0.0, 1.0).backward()
    assert calls_of(live) == {"a": 2, "b": 3, "c": 1}
    assert num_hooks(model) == 0


def test_a_transform_of_one_tensor_acts_on_each_with_its_value() -> None:
    model = Weighted()
    with torch.no_grad():
        model.a.fill_(1.0)
        model.b.fill_(-1.0)
    transform = gs.ScaleBySign(positive=10.0, negative=2.0, of="value")
    with attached(model, transform, _at()):
        model(3.0, 4.0, 5.0).backward()
    assert _grads(model)[:2] == [30.0, 8.0]


# Backwards inside backwards


def _checkpointed(reentrant: bool, inside: tuple[int, ...] = (1,)) -> Made:
    """Layers, those in `inside` each in a checkpoint of its own."""

    def forward(self: Made, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = recomputed(layer, x, reentrant) if index in inside else layer(x)
        return x.pow(2).sum()

    torch.manual_seed(0)
    return Made(forward, layers=nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))


def _x() -> Tensor:
    return torch.ones(1, 2, requires_grad=True)


def _norm(model: nn.Module) -> float:
    return torch.cat([grad.flatten() for grad in gradients(model).values()]).norm().item()


def test_a_backward_called_by_a_hook_on_a_leaf_is_reported() -> None:
    model, other = Weighted(), torch.ones(1, requires_grad=True)

    @torch.enable_grad()
    def more(param: Tensor) -> None:
        model(3.0, 4.0).backward()

    other.register_post_accumulate_grad_hook(more)
    with (
        pytest.warns(gs.SurgeryWarning, match=r"hook on a leaf called backward\(\) inside another"),
        attached(model, CLIP, _at("re:[ab]")) as live,
    ):
        (other * 2).backward()
        assert _grads(model)[:2] == [3.0, 4.0]
        model.zero_grad()
        model(3.0, 4.0).backward()
    assert calls_of(live) == {"a": 1, "b": 1}


# Errors


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise OSError("gone")


def _fails(grad: Tensor) -> None:
    raise OSError("gone")


def _failing(model: nn.Module, nested: bool) -> Tensor:
    """A loss whose backward fails: between two parameters, or after an inner backward."""
    if nested:
        x = model.layers[0](_x())  # pyright: ignore[reportIndexIssue, reportCallIssue]
        x.register_hook(_fails)
        return recomputed(model.layers[1], x, True).sum()  # pyright: ignore
    b = Fails.apply(model.b * 4.0)  # pyright: ignore
    return (b + model.a * 3.0).sum()  # pyright: ignore


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_backward_that_raises_is_reported_and_the_next_one_acts(nested: bool, last: bool) -> None:
    model = _checkpointed(True, ()) if nested else Weighted()
    at = _at() if nested else _at("re:[ab]")
    args = (_x(),) if nested else (3.0, 4.0)
    with (
        pytest.warns(gs.SurgeryWarning, match=AT_ROOT) as caught,
        attached(model, CLIP, at) as live,
    ):
        if last:
            model(*args).backward()
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                _failing(model, nested).backward()
        if not last:
            model.zero_grad()
            model(*args).backward()
            assert _norm(model) == pytest.approx(1.0)
    assert set(calls_of(live).values()) == {1}
    assert len(caught) == 1
    assert num_hooks(model) == 0


def test_an_optimizer_that_steps_inside_the_backward_is_reported() -> None:
    model = Weighted()

    def step(param: Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad)
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    gone = "a, b had no .grad when the backward pass ended"
    with (
        pytest.warns(gs.SurgeryWarning) as caught,
        attached(model, CLIP, _at("re:[ab]")) as live,
    ):
        model(3.0, 4.0).backward()
    assert gone in " ".join(str(warning.message) for warning in caught)
    assert "step" in live.ledger.table()  # as the hook of another
    assert [param.item() for param in model.parameters()] == [-3.0, -4.0, 0.0]


def test_an_optimizer_that_waits_for_the_end_of_backward_gets_the_transformed_gradients() -> None:
    model = Weighted()
    queued: list[bool] = []

    def step(param: Tensor) -> None:
        if not queued:
            queued.append(True)
            torch.autograd.Variable._execution_engine.queue_callback(optimizer.step)

    optimizer = sgd(model, lr=1.0)
    with attached(model, CLIP, _at("re:[ab]")):
        # Registered after the hooks of the group: their callback is queued first.
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        model(3.0, 4.0).backward()
    assert [param.item() for param in model.parameters()] == pytest.approx([-0.6, -0.8, 0.0])


# Contexts


def test_the_new_gradients_have_a_graph_only_under_create_graph() -> None:
    w = nn.Parameter(torch.tensor([2.0]))
    model = nn.ParameterDict({"w": w})
    with attached(model, TEN, _at()):
        with pytest.warns(UserWarning, match="create_graph=True will create a reference cycle"):
            (w**3).backward(create_graph=True)
        grad, w.grad = w.grad, None
        assert grad is not None
        # 10 * 3 w^2, and the derivative of that.
        assert grad.item() == 120.0
        assert torch.autograd.grad(grad, w)[0].item() == 120.0
    with attached(model, TimesValue(), _at()):
        (w**3).backward()
    assert w.grad is not None
    assert (w.grad.item(), w.grad.requires_grad) == (24.0, False)


# Several processes


def _averaged(ranks: Ranks, folder: Path) -> list[dict[str, list[float | None]]]:
    """Run one of the ranks with gradients 1, 5 (and 3), clipped to 2: the average is 3."""
    x = torch.tensor([1.0, 5.0, 3.0][ranks.rank])
    found: dict[str, list[float | None]] = {}

    def train(name: str, transform: Transform, inner: bool = False, **options: bool) -> None:
        net = Weighted()
        net.register_parameter("c", None)
        outer = DistributedDataParallel(net, **options)
        unused = options.get("find_unused_parameters", False)
        with attached(outer.module if inner else outer, transform, _at()):
            for _ in range(3):  # the buckets are rebuilt after the first
                outer.zero_grad(set_to_none=False)
                if name == "no_sync":
                    with outer.no_sync():
                        outer(x, x).backward()
                values = (x,) if unused and ranks.rank else (x, x)
                outer(*values).backward()
        found[name] = _grads(outer)

    train("plain", gs.Identity())
    train("clip", gs.Clip(2.0))
    train("inner", gs.Clip(2.0), inner=True)
    train("bucket views", gs.Clip(2.0), gradient_as_bucket_view=True)
    train("static graph", gs.Clip(2.0), static_graph=True)
    train("global norm", gs.ClipGlobalNorm(3.0))
    train("unused on a rank", gs.Clip(2.0), find_unused_parameters=True)
    train("no_sync", gs.Scale(2.0))
    return ranks.gathered(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [2, 3])
def test_on_several_ranks_it_acts_on_the_averaged_gradients(count: int) -> None:
    found = in_ranks(count, _averaged)
    assert found == [found[0]] * count
    norm = pytest.approx(3.0 / 2.0**0.5)
    clipped = {name: [2.0, 2.0] for name in ("clip", "inner", "bucket views", "static graph")}
    assert found[0] == clipped | {
        "plain": [3.0, 3.0],
        "global norm": [norm, norm],
        "unused on a rank": [2.0, pytest.approx(1 / count)],
        "no_sync": [12.0, 12.0],
    }


def _added(ranks: Ranks, folder: Path) -> list[tuple[list[float | None], dict[str, int], str]]:
    """Add an intervention after or before a forward, with or without `no_sync`."""
    x, found = torch.tensor([1.0, 5.0][ranks.rank]), []
    for syncs, late in ((True, True), (False, True), (False, False)):
        net = Weighted()
        net.register_parameter("c", None)
        outer = DistributedDataParallel(net)
        live = gs.Surgery(gs.Intervention(gs.Identity(), gs.Weights(stage="forward"))).start(outer)
        with nullcontext() if syncs else outer.no_sync():
            loss = outer(x, x) if late else None
            live.add(gs.Intervention(gs.Clip(2.0), _at()))
            (outer(x, x) if loss is None else loss).backward()
        first = _grads(net)
        outer.zero_grad()
        outer(x, x).backward()
        calls = {entry.site: entry.calls for entry in live.ledger if entry.intervention == "clip"}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            live.close()
        texts = " ".join(str(warning.message) for warning in caught)
        found.append(([*first, *_grads(net)], calls, texts))
    return found


def test_a_graph_of_ddp_that_was_built_before_is_left_alone_and_told() -> None:
    (grads, calls, text), *others = in_ranks(2, _added)
    assert grads == [3.0, 3.0, 2.0, 2.0]
    assert calls == {"a": 1, "b": 1}
    assert "the graph was built before the intervention was added" in text
    assert others == [([1.0, 1.0, 2.0, 2.0], calls, "")] * 2  # of gradients 1 and 5
