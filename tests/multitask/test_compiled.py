"""Models compiled by torch.compile: measuring and aggregating are the same as without."""

import warnings
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator
from tests.multitask.nets import ENGINES, WIDTH, Net, Uneven, at_shared, close, grads_of

TARGETS = {"a": 0.5, "b": -1.0, "c": 2.0}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Each test compiles anew."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Losing(Net):
    """Its losses are part of the compiled graph."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = super().forward(x).items()
        return {task: (own - TARGETS[task]).square().mean() for task, own in outputs}


def batch(size: int) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size))


def compiled(
    model: nn.Module, dynamic: bool | None = False, backend: str = "aot_eager"
) -> nn.Module:
    return torch.compile(model, backend=backend, dynamic=dynamic)  # pyright: ignore


def train(every: int, dynamic: bool | None, *items: gs.Intervention) -> tuple[list[Tensor], int]:
    """The gradients of a model after batches of several sizes, and how often it was measured."""
    torch.compiler.reset()
    model = Losing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gs.Surgery(*items).attach(model, optimizer, effects_every=every) as live:
        called = compiled(model, dynamic)
        for size in (8, 5, 5):
            optimizer.zero_grad()
            live.backward(called(batch(size)))
            optimizer.step()
        return [own.detach().clone() for own in model.parameters()], len(live.conflicts.fetch())


@pytest.mark.parametrize(
    ("aggregator", "dynamic"),
    [
        (gs.Mean(), False),
        pytest.param(gs.PCGrad(), None, marks=pytest.mark.slow),
        pytest.param(gs.FAMO(), None, marks=pytest.mark.full),
        pytest.param(gs.Mean(), None, marks=pytest.mark.full),
        pytest.param(gs.PCGrad(), False, marks=pytest.mark.full),
        pytest.param(gs.FAMO(), False, marks=pytest.mark.full),
    ],
)
def test_batches_of_several_sizes_train_the_same_measured_or_not(
    aggregator: Aggregator, dynamic: bool | None
) -> None:
    plain, none = train(0, dynamic, at_shared(aggregator))
    measured, count = train(2, dynamic, at_shared(aggregator))
    assert (none, count) == (0, 2)
    assert all(torch.equal(own, other) for own, other in zip(plain, measured, strict=True))


def before(model: nn.Module) -> nn.Module:
    """A model that was compiled, and sent back through, before anything was attached."""
    called = compiled(model)
    sum(called(batch(8)).values()).backward()
    model.zero_grad()
    return called


def test_a_single_use_graph_is_not_measured_and_trains_on() -> None:
    model, plain = Losing(), Losing()
    called = before(model)
    with gs.Surgery(at_shared(gs.Mean())).attach(model) as live:
        with pytest.warns(gs.SurgeryWarning, match="for one backward pass only.* are not measured"):
            live.backward(called(batch(8)))
        assert live.conflicts.fetch() == []
        found = grads_of(model)
        live.backward(called(batch(5)))
        assert len(live.conflicts.fetch()) == 1
    called = before(plain)
    sum(loss / 3 for loss in called(batch(8)).values()).backward()
    close(found, grads_of(plain))


def test_a_single_use_graph_is_refused_if_each_task_needs_a_backward() -> None:
    model = Losing()
    called = before(model)
    rule = "for one backward pass only.*torch.compiler.reset"
    with gs.Surgery(at_shared(Uneven())).attach(model) as live:
        with pytest.raises(RuntimeError, match=rule):
            live.backward(called(batch(8)))
        torch.compiler.reset()
        live.backward(compiled(model)(batch(8)))


class Spent(nn.Module):
    """Its compiled backward may write to what its forward has saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.tanh().exp()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
@pytest.mark.parametrize("engine", ENGINES)
def test_single_use_graphs_of_one_task_are_not_refused(
    engine: str,
) -> None:
    found = []
    for compiles in (False, True):
        model = Net()
        model.heads = nn.ModuleDict({task: Spent(WIDTH) for task in TARGETS})
        model.trunk.append(Spent(WIDTH))
        parts = [*model.heads.values(), *([model.trunk] if engine == "feature" else [])]
        for part in parts if compiles else ():
            part.compile(backend="aot_eager", dynamic=False)
        sum(own.sum() for own in model(batch(8)).values()).backward()
        model.zero_grad()
        with gs.Surgery(at_shared(Uneven(), **ENGINES[engine])).attach(model) as live:
            live.backward({task: own.square().mean() for task, own in model(batch(8)).items()})
        found.append(grads_of(model))
    close(*found)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_a_representation_inside_a_compiled_graph_is_refused() -> None:
    model = Net()
    rule = "inside one compiled graph it cannot be seen where the losses a, b, c separate"
    with gs.Surgery(at_shared(Uneven(), **ENGINES["feature"])).attach(model) as live:
        outputs = compiled(model)(batch(8))
        with pytest.raises(RuntimeError, match=rule):
            live.backward({task: own.square().mean() for task, own in outputs.items()})
        live.backward({task: own.square().mean() for task, own in model(batch(8)).items()})


@pytest.mark.full
def test_the_saved_tensors_of_a_single_use_graph_are_not_overwritten() -> None:
    model = Net(("a", "b"))
    model.trunk.extend([nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()])
    encoder = compiled(model.trunk, backend="inductor")

    def losses(encode: nn.Module) -> dict[str, Tensor]:
        return {
            task: (head(encode(number * batch(5))) - 1).square().mean()
            for number, (task, head) in enumerate(model.heads.items(), 1)
        }

    sum(losses(encoder).values()).backward()
    found = []
    for encode in (encoder, model.trunk):
        model.zero_grad()
        with gs.Surgery(at_shared(gs.PCGrad())).attach(model) as live:
            live.backward(losses(encode))
        found.append(grads_of(model))
    close(*found)


def test_a_single_use_graph_is_not_retained() -> None:
    model = Losing()
    called = before(model)
    with gs.Surgery(at_shared(gs.Mean())).attach(model, effects_every=0) as live:
        with pytest.raises(RuntimeError, match="for one backward pass only"):
            live.backward(called(batch(8)), retain_graph=True)
        live.backward(called(batch(8)))


# Parameters that a task reaches


def hinged(losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss of b is satisfied, and has a gradient of zero."""
    return {**losses, "b": torch.relu(losses["b"] - 1e3)}


Change = Callable[[Net], object]
CHANGES: dict[str, Change] = {
    "nothing": lambda model: None,
    "a head of zeros": lambda model: nn.init.zeros_(model.heads["b"].weight),
    "heads of zeros": lambda model: [
        nn.init.zeros_(head.weight)  # pyright: ignore[reportArgumentType]
        for head in model.heads.values()
    ],
}


@pytest.mark.parametrize(
    ("aggregator", "backend"),
    [
        pytest.param(gs.Mean(), "aot_eager", marks=pytest.mark.slow),
        (gs.PCGrad(), "aot_eager"),
        pytest.param(gs.PCGrad(), "inductor", marks=pytest.mark.full),
        pytest.param(gs.UPGrad(), "aot_eager", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("change", "satisfied"),
    [("nothing", True), ("a head of zeros", False), ("heads of zeros", True)],
)
def test_a_zero_gradient_counts_as_in_eager_mode(
    aggregator: Aggregator, satisfied: bool, change: str, backend: str
) -> None:
    found = []
    for called in (lambda model: model, lambda model: compiled(model, backend=backend)):
        model = Losing()
        CHANGES[change](model)
        with gs.Surgery(at_shared(aggregator)).attach(model) as live:
            losses = called(model)(batch(8))
            live.backward(hinged(losses) if satisfied else losses)
            (conflict,) = live.conflicts.fetch()
            assert conflict.tasks == ["a", "b", "c"]
        found.append(grads_of(model))
    close(found[1], found[0], rtol=1e-4)


class Gated(Losing):
    """The second half of the trunk reaches task b through a gate that may be shut."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        opened, rest = x[0, 0], self.trunk(x)
        gated = self.heads["b"](torch.relu(rest * opened))
        return {"a": self.heads["a"](rest).square().mean(), "b": gated.mean()}


def test_a_parameter_once_reached_stays_reached_when_a_relu_blocks_it() -> None:
    model = Gated()
    shut, opened = (torch.cat([torch.tensor([[at, 0, 0, 0.0]]), batch(7)]) for at in (0.0, 1.0))
    found = []
    for called in (lambda model: model, compiled):
        with (
            warnings.catch_warnings(),
            gs.Surgery(at_shared(gs.MGDA())).attach(model) as live,
        ):
            warnings.simplefilter("ignore", gs.SurgeryWarning)
            forward = called(model)
            for x in (*[shut] * 6, opened, shut):
                model.zero_grad()
                live.backward(forward(x))
        found.append(grads_of(model))
    close(*found)


class Satisfied(Losing):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return hinged(super().forward(x))


@pytest.mark.parametrize(
    ("aggregator", "tasks"), [(gs.Mean(), "ab"), (gs.PCGrad(), "abc"), (Uneven(), "ab")]
)
def test_a_loss_of_zero_inside_the_graph_does_not_stop_training(
    aggregator: Aggregator, tasks: str
) -> None:
    found = []
    for called in (lambda model: model, compiled):
        model = Satisfied()
        with warnings.catch_warnings(), gs.Surgery(at_shared(aggregator)).attach(model) as live:
            warnings.simplefilter("ignore", gs.SurgeryWarning)
            losses = called(model)(batch(8))
            live.backward({task: losses[task] for task in tasks})
        found.append(grads_of(model))
    if aggregator == gs.PCGrad():
        trunk = [{n: own for n, own in grads.items() if "trunk" in n} for grads in found]
        close(*trunk)


def test_a_task_with_zero_gradients_in_a_compiled_graph_warns() -> None:
    model = Satisfied()
    with (
        gs.Surgery(at_shared(gs.Mean())).attach(model) as live,
        pytest.warns(
            gs.SurgeryWarning, match=r"losses\['b'\]: compute it outside .* its gradient is zero"
        ),
    ):
        live.backward(compiled(model)(batch(8)))


def test_probing_a_graph_calls_no_hook() -> None:
    model = Losing()
    met = []
    for param in model.parameters():
        param.register_hook(lambda grad: met.append(grad.clone()))
    with gs.Surgery(at_shared(Uneven())).attach(model) as live:
        live.backward(compiled(model)(batch(8)))
    assert met
    assert all(grad.isfinite().all() for grad in met)


def test_a_block_restores_the_compiler_settings() -> None:
    import torch._functorch.config as functorch
    import torch.compiler.config as compiler

    before = functorch.donated_buffer, compiler.cache_key_tag
    with gs.Surgery(at_shared(Uneven())).attach(Losing()) as live:
        assert not functorch.donated_buffer
        assert compiler.cache_key_tag != before[1]
        live.backward(Losing()(batch(8)) | live.attachment.model(batch(8)))
    assert (functorch.donated_buffer, compiler.cache_key_tag) == before
