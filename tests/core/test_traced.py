"""Interventions in the graphs of torch.compile, against the same in eager code."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.core.traced import why_it_breaks
from gradsurg.plugins.registry import find, names
from gradsurg.sites.places import Selector
from gradsurg.transforms.base import Transform

# Dynamo trips over its own warnings when they are errors.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

X = torch.linspace(-1, 1, 20).view(5, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.i = nn.Linear(4, 4), nn.Linear(4, 2), nn.Identity()
        self.r, self.lstm = nn.ReLU(inplace=True), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.r(self.a(x))
        return self.b(self.a(self.i(hidden).tanh()) + hidden)


class Returns(Net):
    """A module that returns several tensors, which is not traced."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.lstm(x[:, None])[0][:, 0]))


class ReturnsTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.i(self.lstm(x[:, None])[0])
        return self.b(self.a(self.i(self.lstm(hidden)[0])[:, 0]))


class ByKeywordTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.i(input=self.i(input=self.a(x))))


class ByKeyword(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(input=self.a(x))


class Nested(Net):
    """The output of a module is that of another one inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(self.a)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Compiled:
    """A compiled model, and the number of its graphs."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.graphs = model, 0
        self.call: Any = torch.compile(model, backend=self._count)

    def _count(self, graph: Callable[..., Any], inputs: object) -> Callable[..., Any]:
        self.graphs += 1
        return graph

    def grads(self) -> list[Tensor]:
        return grads_of(self.model, self.call)


def grads_of(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    model.zero_grad()
    call(X).square().sum().backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def equal(ours: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, others)) and len(ours) == len(others)


def surgery(at: Selector, transform: Transform | None = None) -> gs.Surgery:
    return gs.Surgery(gs.Intervention(transform or gs.Scale(0.5), at=at))


@pytest.mark.parametrize(
    ("make", "at", "graphs"),
    [
        (Net, gs.Outputs(types="Linear"), 1),  # one of them is called twice
        (Net, gs.Outputs("[ir]"), 1),  # it returns its input, and it is written to
        (Net, gs.Inputs("[abi]"), 1),
        (Net, gs.Outputs("a", call=1), 0),
        (Net, gs.Inputs(types="Linear", path="total"), 0),
        (Net, gs.Outputs("a") | gs.Outputs("b"), 0),
        (Returns, gs.Outputs("lstm"), 0),
        (ReturnsTwice, gs.Outputs("lstm"), 0),
        (ReturnsTwice, gs.Outputs("*"), 0),
        (ByKeywordTwice, gs.Inputs("i"), 0),
        (ByKeyword, gs.Inputs("b"), 0),
        (ByKeyword, gs.Outputs("a"), 1),
        (Nested, gs.Outputs("[ao]*"), 0),
    ],
)
def test_compiled_code_acts_as_eager_code_does(
    make: Callable[[], nn.Module], at: Selector, graphs: int
) -> None:
    eager = make()
    with surgery(at).attach(eager) as live:
        wanted = grads_of(eager, eager)
        sites = {entry.site for entry in live.ledger}
    compiled = Compiled(make())
    with surgery(at).attach(compiled.model, effects_every=0) as live:
        assert equal(compiled.grads(), wanted)
        assert equal(compiled.grads(), wanted)
        assert any(entry.is_traced for entry in live.ledger) == bool(graphs)
        assert graphs or {entry.site for entry in live.ledger} == sites
        assert compiled.graphs == 1 or not graphs
    assert not equal(wanted, grads_of(eager, eager))
    assert equal(compiled.grads(), grads_of(eager, eager))  # without the surgery


def test_changes_are_seen_by_compiled_code() -> None:
    compiled, at = Compiled(Net()), gs.Outputs("a")
    plain = grads_of(compiled.model, compiled.model)
    with surgery(at, gs.Scale(1.0)).attach(compiled.model, effects_every=0) as live:
        assert equal(compiled.grads(), plain)
        live.set("scale", factor=0.5)
        halved = compiled.grads()
        assert not equal(halved, plain)
        live.remove(live.add(gs.Intervention(gs.Zero(), at=gs.Outputs("b"))))
        assert equal(compiled.grads(), halved)


def test_what_is_measured_or_measures_breaks_the_graph() -> None:
    for options in ({"effects_every": 1}, {"effects_every": 0, "shadow": True}):
        torch.compiler.reset()
        compiled = Compiled(Net())
        with surgery(gs.Outputs("a"), gs.Clip(0.1)).attach(compiled.model, **options) as live:
            compiled.grads()
            assert not any(entry.is_traced for entry in live.ledger)
        assert compiled.graphs > 1


@pytest.mark.parametrize("fields", [{}, {"engine": "feature", "features": "1"}])
def test_beside_an_aggregator_modules_break_the_graph(fields: dict[str, str]) -> None:
    """Its passes pause hooks and leave out nodes, which compiled code cannot obey."""
    grads = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        call = Compiled(model).call if is_compiled else model
        items = (
            gs.Intervention(gs.PCGrad(), at=gs.SharedParameters(**fields)),
            gs.Intervention(gs.Scale(0.5), at=gs.Outputs("1")),
        )
        with gs.Surgery(*items).attach(model, effects_every=0) as live:
            output = call(X)
            live.backward([output.square().sum(), output.sum()])
            assert not any(entry.is_traced for entry in live.ledger)
        grads.append([param.grad for param in model.parameters() if param.grad is not None])
    assert equal(*grads)


def test_traced_sites_are_told_and_are_not_silent() -> None:
    compiled = Compiled(Net())
    with surgery(gs.Outputs("a")).attach(compiled.model, effects_every=0) as live:
        for _ in range(8):
            compiled.grads()
        assert [entry.site for entry in live.ledger if entry.is_traced] == ["a#0"]
        assert not live.ledger.silent("scale")
    assert "compiled" in live.ledger.table()


@pytest.mark.parametrize(
    ("intervention", "found"),
    [
        (gs.Intervention(gs.Clip(0.1), at=gs.Outputs()), ""),
        (gs.Intervention(gs.Chain(gs.Clip(0.1), gs.Sign()), at=gs.Inputs()), ""),
        (gs.Intervention(gs.Momentum(), at=gs.Outputs()), "Momentum"),
        (gs.Intervention(gs.AddNoise(), at=gs.Outputs()), "AddNoise"),
        (gs.Intervention(lambda grad: grad * 2, at=gs.Outputs()), "lambda"),
        (gs.Intervention(gs.ScaleBySign(of="value"), at=gs.Outputs()), "ScaleBySign"),
        (gs.Intervention(gs.Clip(0.1), at=gs.Outputs(), when=gs.Steps(stop=3)), "Steps"),
        (gs.Intervention(gs.Clip(0.1), at=gs.Outputs(item="0")), "item"),
        (gs.Intervention(gs.Clip(0.1), at=gs.Outputs().first(1)), "limit=1"),
        (gs.Intervention(gs.Clip(0.1), at=gs.Activations()), "Activations"),
    ],
)
def test_the_plan_tells_why_a_module_breaks_the_graph(
    intervention: gs.Intervention, found: str
) -> None:
    why = why_it_breaks(intervention)
    assert bool(why) == bool(found)
    assert found in why
    plan = gs.Surgery(intervention).plan(torch.compile(Net()))  # pyright: ignore[reportArgumentType]
    assert (why or "effects_every=0") in plan


def test_every_transform_that_is_said_to_be_traceable_is() -> None:
    traced = []
    for name in names("transforms"):
        try:
            transform = find("transforms", name)()
            item = gs.Intervention(transform, at=gs.Outputs("a"))
        except (TypeError, ValueError):
            continue  # no transform, or none that acts here by itself
        if item.aggregator is not None or why_it_breaks(item):
            continue
        traced.append(name)
        torch.compiler.reset()
        model = Net()
        with gs.Surgery(item).attach(model, effects_every=0):
            wanted = grads_of(model, model)
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            ours = grads_of(model, compiled)
        torch.testing.assert_close(ours, wanted, equal_nan=True, msg=name)
    assert len(traced) > 12
