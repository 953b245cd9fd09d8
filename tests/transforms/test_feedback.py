"""FeedbackWeights and DirectFeedback: feedback alignment through fixed random matrices."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradsurg as gs
from gradsurg.plugins.fields import in_short
from gradsurg.sites.places import Selector
from gradsurg.testing.transforms import context_with
from gradsurg.transforms.base import Need, Stateless, Transform, TransformContext, TransformProperty

LAYERS = gs.Nodes("Addmm", "[24]", side="leave", edge=1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
    ).double()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 7).double(), torch.randint(0, 3, (6,))


def backward(model: nn.Module) -> dict[str, Tensor]:
    inputs, targets = batch()
    model.zero_grad()
    functional.cross_entropy(model(inputs), targets).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def drawn(site: str, outputs: int, inputs: int) -> Tensor:
    generator = TransformContext(site).generator(torch.device("cpu"), per_call=False)
    weights = torch.empty(outputs, inputs)
    return weights.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator).double()


def by_hand(model: nn.Sequential, top: Tensor, below: Tensor, direct: bool) -> dict[str, Tensor]:
    """Return the weight gradients with e B in place of e W, computed from the output error."""
    inputs, targets = batch()
    first = model[1](model[0](inputs))
    second = model[3](model[2](first))
    error = functional.softmax(model[4](second), dim=1) - functional.one_hot(targets, 3)
    error = error / len(inputs)
    last = error @ top * (1 - second**2)
    lower = (error if direct else last) @ below * (1 - first**2)
    return {
        "0.weight": lower.T @ inputs,
        "2.weight": last.T @ first,
        "4.weight": error.T @ second,
    }


def test_feedback_weights_compute_feedback_alignment_at_every_step() -> None:
    model = net()
    with gs.Surgery(gs.Intervention(gs.FeedbackWeights(), at=LAYERS)).attach(model) as live:
        top, below = (
            drawn(f"feedback_weights/{at}#0/AddmmBackward[0].1", *shape)
            for at, shape in (("4", (3, 4)), ("2", (4, 5)))
        )
        for _ in range(2):
            found = backward(model)
            for name, expected in by_hand(model, top, below, direct=False).items():
                torch.testing.assert_close(found[name], expected)
            live.tick()


def test_direct_feedback_uses_the_output_error_at_every_step() -> None:
    model = net()
    at = gs.Outputs("*", types="Tanh")
    with gs.Surgery(gs.Intervention(gs.DirectFeedback(), at=at)).attach(model) as live:
        top, below = drawn("direct_feedback/3#0", 3, 4), drawn("direct_feedback/1#0", 3, 5)
        for _ in range(2):
            found = backward(model)
            for name, expected in by_hand(model, top, below, direct=True).items():
                torch.testing.assert_close(found[name], expected)
            live.tick()


class Seen(Stateless):
    """A transform that records `context.entering`."""

    def __init__(self, asks: bool = True) -> None:
        self.asks = asks
        self.entered: list[tuple[Tensor | None, ...]] = []

    @property
    def properties(self) -> frozenset[TransformProperty]:
        return frozenset({"deterministic"})

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"entering"} if self.asks else ())

    def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
        self.entered.append(context.entering)
        return grad


@pytest.mark.parametrize(
    "wrap", [lambda own: own, gs.Chain, gs.Scheduled, gs.ErrorFeedback, gs.NormMatched]
)
def test_a_transform_at_a_nodes_input_gets_the_gradients_of_its_outputs(
    wrap: type[gs.Chain],
) -> None:
    seen, model, entered = Seen(), net(), list[Tensor]()
    with gs.Surgery(gs.Intervention(wrap(seen), at=LAYERS)).attach(model):
        inputs, targets = batch()
        output = model(inputs)
        output.register_hook(entered.append)
        functional.cross_entropy(output, targets).backward()
    assert len(seen.entered) == 2
    (last,) = seen.entered[0]
    assert last is not None
    assert torch.equal(last, entered[0])


def test_a_transform_without_that_need_does_not_get_them() -> None:
    seen, model = Seen(asks=False), net()
    when = gs.Threshold(above=0.0, source="grad")
    with gs.Surgery(gs.Intervention(seen, at=LAYERS, when=when)).attach(model):
        backward(model)
    assert seen.entered == [(), ()]


@pytest.mark.parametrize(
    "at", [gs.Parameters(), gs.Outputs("*"), gs.Nodes("Addmm"), LAYERS | gs.Nodes("Tanh")], ids=repr
)
@pytest.mark.parametrize("wrap", [lambda own: own, gs.Scheduled, gs.Chain])
def test_feedback_weights_are_refused_at_sites_without_a_nodes_output_gradient(
    at: gs.Parameters, wrap: type[gs.Chain]
) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"autograd node, which {in_short(at)} does not")
    ):
        gs.Intervention(wrap(gs.FeedbackWeights()), at=at)


def test_hooks_on_raw_tensors_and_nodes_refuse_both_feedback_transforms() -> None:
    tensor = torch.ones(3, requires_grad=True)
    for place in (tensor, (tensor * 2).grad_fn):
        assert place is not None
        with pytest.raises(ValueError, match="needs the gradient of the model's output"):
            gs.hook(place, gs.DirectFeedback())
        with pytest.raises(ValueError, match="needs the gradient that enters the autograd node"):
            gs.hook(place, gs.FeedbackWeights())


LEAVE = partial(gs.Nodes, side="leave")


def square(at: Selector, transform: Transform, bias: bool = True) -> dict[str, int]:
    """Return the sites of a step where shapes do not help: batch = inputs = outputs."""
    model = nn.Sequential(*(nn.Linear(5, 5, bias=bias) for _ in range(3)), nn.Tanh())
    with gs.Surgery(gs.Intervention(transform, at=at)).attach(model) as live:
        model(torch.ones(5, 5)).sum().backward()
        return {entry.site: entry.calls for entry in live.ledger}


@pytest.mark.parametrize(
    "at",
    [
        LEAVE("Addmm", edge=2),
        LEAVE("Addmm", edge=0),
        LEAVE("Addmm"),
        LEAVE("Mm"),
        LEAVE("Mm", edge=1),
        LEAVE("Tanh", edge=0),
        LEAVE("Convolution", edge=0),
        LEAVE("*", edge=1),
        LEAVE("Addmm", edge=1) | LEAVE("Tanh", edge=1),
        ~LEAVE("Addmm", edge=1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("wrap", [lambda own: own, gs.Scheduled, gs.Chain])
def test_feedback_weights_are_refused_elsewhere_than_at_a_products_input(
    at: Selector, wrap: type[gs.Chain]
) -> None:
    with pytest.raises(
        ValueError, match="gradient of the input of a matrix product, which .* does not"
    ):
        square(at, wrap(gs.FeedbackWeights()))


@pytest.mark.parametrize(
    "at",
    [
        LEAVE("Addmm", "[12]", edge=1),
        LEAVE("AddmmBackward0", "1", edge=1) | LEAVE("Addmm", "2", edge=1),
        LEAVE("Addmm", edge=1) & ~LEAVE("Addmm", "0", edge=1),
        LEAVE("Mm", "[12]", edge=0),
    ],
    ids=repr,
)
def test_feedback_weights_act_at_the_input_of_a_product(at: Selector) -> None:
    edge, bias = at.leaves[0].edge, "Mm" not in repr(at)
    kind = "Addmm" if bias else "Mm"
    assert square(at, gs.FeedbackWeights(), bias) == {
        f"{layer}#0/{kind}Backward[0].{edge}": 1 for layer in (2, 1)
    }


def test_feedback_weights_refuse_gradients_of_different_batch_sizes() -> None:
    context = TransformContext("a", entering=(torch.ones(2, 3),))
    with pytest.raises(
        ValueError, match=r"at the site 'a' the gradient, of shape \[4, 5\], and the node"
    ):
        gs.FeedbackWeights().apply(torch.ones(4, 5), context)


@pytest.mark.parametrize(
    "at",
    [
        gs.Parameters("1.weight"),
        gs.Parameters("1.weight", stage="backward"),
        gs.Parameters("1.weight", stage="accumulated"),
        gs.Uses("1.weight"),
        gs.Nodes("T"),
        LEAVE("Addmm", edge=2),
        gs.Captured("1.weight"),
        gs.Outputs("1") | gs.Parameters("1.weight"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("wrap", [lambda own: own, gs.Scheduled, gs.Chain])
def test_direct_feedback_is_refused_at_gradients_without_a_batch_axis(
    at: Selector, wrap: type[gs.Chain]
) -> None:
    with pytest.raises(
        ValueError,
        match="use it at Outputs .* same examples, which .* does not provide",
    ):
        square(at, wrap(gs.DirectFeedback()))


@pytest.mark.parametrize("at", [gs.Outputs("0"), gs.Inputs("1"), gs.Outputs("0") | gs.Inputs("1")])
def test_direct_feedback_acts_at_inputs_and_outputs(at: Selector) -> None:
    assert set(square(at, gs.DirectFeedback()).values()) == {1}


class Twice(nn.Module):
    """A model that calls the same layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(self.inner(inputs))


@pytest.mark.parametrize(
    ("transform", "at"),
    [(gs.FeedbackWeights(), LEAVE("Addmm", edge=1)), (gs.DirectFeedback(), gs.Outputs("inner"))],
    ids=repr,
)
def test_a_layer_that_is_called_twice_has_one_matrix(transform: Transform, at: Selector) -> None:
    model, inputs = Twice(), torch.ones(1, 5, requires_grad=True)
    kept = list[Tensor]()

    class Same(Stateless):
        """A transform that records the wrapped transform's result for ones."""

        @property
        def properties(self) -> frozenset[TransformProperty]:
            return frozenset()

        @property
        def needs(self) -> frozenset[Need]:
            return transform.needs

        def apply(self, grad: Tensor, context: TransformContext) -> Tensor:
            backward = SimpleNamespace(error=torch.ones(1, 5), task="")
            ones = replace(context, backward=backward, entering=(torch.ones(1, 5),))
            kept.append(transform.update(grad, {}, ones)[0])
            return grad

    with gs.Surgery(gs.Intervention(Same(), at=at)).attach(model) as live:
        model(inputs).sum().backward()
        assert len({entry.site for entry in live.ledger}) == 2
    assert torch.equal(*kept)


def test_a_number_in_a_module_name_is_not_taken_for_a_call_number() -> None:
    def draw(site: str) -> Tensor:
        generator = TransformContext(site).generator(torch.device("cpu"), per_call=False)
        return torch.rand(3, generator=generator)

    assert torch.equal(draw("b#2/h#0"), draw("b#2/h#1"))
    assert not torch.equal(draw("b#2/h#0"), draw("b#3/h#0"))
    assert not torch.equal(draw("h#1/Mm[0].0"), draw("h#1/Mm[1].0"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("transform", [gs.FeedbackWeights(), gs.DirectFeedback()], ids=repr)
def test_the_matrix_is_the_same_in_every_dtype(transform: Stateless, dtype: torch.dtype) -> None:
    one, other = (
        transform.apply(torch.ones(1, 9, dtype=own), context_with(torch.ones(1, 1, dtype=own)))
        for own in (torch.float32, dtype)
    )
    assert torch.equal(one.to(dtype), other)


def test_the_output_error_is_dropped_at_the_end_of_its_backward() -> None:
    model = net()
    intervention = gs.Intervention(gs.DirectFeedback(), at=gs.Outputs("*", types="Tanh"))
    with gs.Surgery(intervention).attach(model) as live:
        backward(model)
        assert live.clock.error is None
        with pytest.raises(ValueError, match="not known yet at the site"):
            model[1](torch.ones(2, 5, requires_grad=True).double()).sum().backward()


def test_the_output_error_of_a_failed_backward_is_dropped_in_the_next_forward() -> None:
    model = net()
    at = gs.Outputs("*", types="Tanh")
    hidden = list[Tensor]()
    model[1].register_forward_hook(lambda module, args, output: hidden.append(output))

    def fails(grad: Tensor) -> None:
        raise RuntimeError("caught")

    with gs.Surgery(gs.Intervention(gs.DirectFeedback(), at=at)).attach(model) as live:
        handle = model[0].weight.register_hook(fails)
        with pytest.raises(RuntimeError, match="caught"):
            backward(model)
        handle.remove()
        assert live.clock.error is not None
        model(batch()[0])
        with pytest.raises(ValueError, match="not known yet at the site"):
            hidden[-1].sum().backward()


@pytest.mark.parametrize(
    "at",
    [gs.Parameters(stage="step"), gs.Activations("*"), gs.Parameters(stage="backward_end")],
    ids=repr,
)
@pytest.mark.parametrize("wrap", [lambda own: own, gs.Scheduled, gs.Chain])
def test_direct_feedback_is_refused_at_stages_outside_of_the_backward(
    at: gs.Parameters, wrap: type[gs.Chain]
) -> None:
    with pytest.raises(ValueError, match="needs the gradient of the model's output"):
        gs.Intervention(wrap(gs.DirectFeedback()), at=at)


def test_a_graph_used_after_detaching_leaves_no_output_error() -> None:
    model = net()
    at = gs.Outputs("*", types="Tanh")
    inputs, targets = batch()
    with gs.Surgery(gs.Intervention(gs.DirectFeedback(), at=at)).attach(model) as live:
        loss = functional.cross_entropy(model(inputs), targets)
        functional.cross_entropy(model(inputs), targets).backward()
    clock = live.clock
    errors = list[object]()
    model[0].weight.register_hook(lambda grad: errors.append(clock.error))
    loss.backward()
    assert errors == [None]
    assert not model._forward_hooks


def test_direct_feedback_refuses_a_model_with_two_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            output = self.inner(inputs)
            return output, output

    model = Two()
    at = gs.Outputs("*", types="Tanh")
    with (
        pytest.raises(TypeError, match="must be one tensor, found tuple"),
        gs.Surgery(gs.Intervention(gs.DirectFeedback(), at=at)).attach(model),
    ):
        model(batch()[0])


def test_the_result_is_proportional_to_the_scale() -> None:
    one, three = (
        gs.FeedbackWeights(scale).apply(
            torch.ones(2, 5), TransformContext(entering=(torch.ones(2, 3),))
        )
        for scale in (1.0, 3.0)
    )
    torch.testing.assert_close(three, 3 * one)
    assert one.abs().max() < 3 * 5**-0.5
