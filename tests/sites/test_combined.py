"""Combined: the algebra of selectors, and how many sites it must or may give."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.experiment.build import build
from gradsurg.experiment.compose import CONFIG_DIR, plain, register
from gradsurg.plugins.fields import SelectionError
from gradsurg.sites.places import Named, Place, Selector
from tests.nets import attached, backward, gradients, num_hooks, small
from tests.sites.points import Double, Made, recomputed

P, M, N = gs.Parameters, gs.Outputs, gs.Nodes


def sites(model: nn.Module, at: Selector, x: Tensor | None = None) -> list[str]:
    """The sites that a gradient has passed, each once, in the order in which they were met."""
    optimizer = torch.optim.SGD([torch.zeros(1), *model.parameters()], lr=0.0)
    with attached(model, gs.Scale(1.0), at, optimizer) as live:
        model(torch.ones(2, 6) if x is None else x).sum().backward()
        optimizer.step()
    met = [entry.site for entry in live.ledger if entry.calls]
    assert {entry.calls for entry in live.ledger if not entry.skipped} == {1}
    assert num_hooks(model, optimizer) == 0
    return met


FIRST = ["first.weight", "first.bias"]
LAST = ["last.weight", "last.bias"]
X = torch.ones(1, 6, requires_grad=True)


def _tied() -> nn.Sequential:
    model = nn.Sequential()
    for name, size in (("encoder", 6), ("decoder", 6), ("head", 1)):
        model.add_module(name, nn.Linear(6, size, bias=False))
    model.decoder.weight = model.encoder.weight
    return model


def _shared() -> nn.Sequential:
    shared = Double()
    return nn.Sequential(shared, Double(), shared)


def _named(name: str) -> Callable[[Place], bool]:
    return lambda place: place.name == name


OF_PARAMETERS = [
    (P("first.*") | P("*.bias"), [*FIRST, "last.bias"]),
    (P("first.*") & P("*.bias"), ["first.bias"]),
    (~P("first.*"), LAST),
    (P() & ~P("first.*"), LAST),
    (~(P("first.*") | P("*.bias")), ["last.weight"]),
    (~(P("first.*") & P("*.bias")), ["first.weight", *LAST]),
    (P().first(3), [*FIRST, "last.weight"]),
    (~P().first(3), ["last.bias"]),
    (P("*.bias") & P().first(2), ["first.bias"]),
    ((P("*.bias") & P()).first(1), ["first.bias"]),
    ((P("*.bias").first(1) | P("last.*").first(1)), ["first.bias", "last.weight"]),
    ((P("first.*") | P("last.bias")).expect(3), [*FIRST, "last.bias"]),
    (P().first(2).expect(2), FIRST),
    (P().where(lambda place: isinstance(place.thing, Tensor) and place.thing.numel() == 5),
     ["first.bias"]),
    (~P().where(_named("last.bias")), [*FIRST, "last.weight"]),
    (P().where(lambda place: "bias" in place.name).first(1), ["first.bias"]),
    (P(stage="step") & ~P("first.*", stage="step"), LAST),
    (P("first.*", stage="step") | P("last.bias", stage="step"), [*FIRST, "last.bias"]),
]  # fmt: skip
OF_KINDS = [
    (M() & ~M("act"), ["first#0", "last#0"]),
    (~M().first(2), ["last#0"]),
    (M().where(lambda place: isinstance(place.thing, nn.ReLU)), ["act#0"]),
    (N("Addmm") & ~N("*", types="ReLU"), ["first#0/AddmmBackward[0]", "last#0/AddmmBackward[0]"]),
    (gs.ModuleGradients("act") | gs.ModuleGradients("act", kind="full_backward"),
     ["act#0", "act#0.input"]),
    (gs.EveryModule("act", kind="full_backward_pre") | gs.EveryModule("act", kind="full_backward"),
     ["act#0", "act#0.input"]),
    (gs.Activations("act") | gs.Activations("act", side="input"), ["act#0", "act#0.input"]),
    (P("last.bias") | M("act") | N("Addmm", module="first"),
     ["last.bias", "act#0", "first#0/AddmmBackward[0]"]),
    (~(P("first.*") | M("act")), [*LAST, "first#0", "last#0"]),
    ((P() | M()) & (P("last.*") | M("act")), [*LAST, "act#0"]),
    ((P() | M()) & P("last.*"), LAST),
    ((P("last.*") | M("act")).first(2), LAST),
    ((P("last.bias") | M()).first(2), ["last.bias", "first#0"]),
    ((P("last.*") | N("Relu")).first(2), LAST),
    ((P("last.*") | M("act")).expect(3), [*LAST, "act#0"]),
    ((P() | M()).where(lambda place: place.name.startswith("l")), [*LAST, "last#0"]),
]  # fmt: skip
OF_TIED = [
    (P("decoder.*"), ["encoder.weight"]),
    (P("encoder.*") & P("decoder.*"), ["encoder.weight"]),
    (P("encoder.*") | P("decoder.*"), ["encoder.weight"]),
    (~P("decoder.*"), ["head.weight"]),
    (~P("encoder.*"), ["head.weight"]),
    (P().first(2), ["encoder.weight", "head.weight"]),
    (P("re:head.*|decoder.*").first(1), ["encoder.weight"]),
    (P().where(lambda place: "decoder.weight" in place.names),
     ["encoder.weight"]),
]  # fmt: skip
OF_SHARED = [
    (M(), ["0#0", "1#0", "2#0"]),
    (M(index=0), ["0#0"]),
    (M(index=(1, 2)), ["1#0", "2#0"]),
    (~M(index=1), ["0#0", "2#0"]),
    (M("0") | M(index=2), ["0#0", "2#0"]),
    (M().first(2), ["0#0", "1#0"]),
    (M(depth=1).expect(3), ["0#0", "1#0", "2#0"]),
    (N("Mul", module="2"), ["2#0/MulBackward[0]"]),
]
TABLES = ((small, OF_PARAMETERS), (small, OF_KINDS), (_tied, OF_TIED), (_shared, OF_SHARED))


@pytest.mark.parametrize(
    ("make", "at", "expected"),
    [(make, at, expected) for make, rows in TABLES for at, expected in rows],
)
def test_selectors_combine_by_set_operations(
    make: Callable[[], nn.Module], at: Selector, expected: list[str]
) -> None:
    """A tied parameter is one element of the set; a module that stands twice has two sites."""
    met = sites(make(), at, X if make is _shared else None)
    assert sorted(met) == sorted(expected)
    if all(isinstance(kind, P) for kind in at.leaves):
        assert at.find(make()) == met == expected


class Thin(gs.Parameters):
    """The parameters with fewer than two dimensions."""

    def near(self, named: Named) -> Sequence[str]:
        return (
            super().near(named) if isinstance(named.thing, Tensor) and named.thing.ndim < 2 else ()
        )


@pytest.mark.parametrize(
    ("at", "factors"),
    [
        (gs.Parameters() | Thin(), (2, 2)),
        (gs.Parameters() & ~Thin(), (2, 1)),
        (~Thin("*"), (2, 1)),
        (Thin(), (1, 2)),
    ],
)
def test_a_subclass_that_selects_otherwise_combines_with_its_base(
    at: Selector, factors: tuple[int, int]
) -> None:
    model = nn.Linear(2, 1)
    with attached(model, gs.Scale(2.0), at):
        model(torch.ones(1, 2)).sum().backward()
    assert gradients(model)["weight"].tolist() == [[factors[0]] * 2]
    assert gradients(model)["bias"].tolist() == [factors[1]]


# How many


def _halves(both: bool) -> Made:
    """A node with two outputs, of which one is used if `both` is not."""

    def forward(self: Made, x: Tensor) -> Tensor:
        left, right = x.mul(2).unbind()
        return (left * right if both else left).sum()

    return Made(forward)


@pytest.mark.parametrize("both", [True, False])
def test_node_outputs_are_counted_after_the_first_backward(both: bool) -> None:
    model, x, number = _halves(both), torch.ones(2, 3, requires_grad=True), 1 + both
    with attached(model, gs.Scale(1.0), N("Unbind").expect(number)) as live:
        model(x).backward()
    assert len(list(live.ledger)) == number
    message = f"{3 - number} sites were expected, found {number}: root#0/UnbindBackward"
    with (
        pytest.raises(LookupError, match=re.escape(message)),
        attached(model, gs.Scale(1.0), N("Unbind").expect(3 - number)),
    ):
        model(x).backward()


def _recomputed(reentrant: bool) -> Made:
    return Made(lambda self, x: recomputed(self.inner, x, reentrant).sum(), inner=small())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("at", [M("inner.*"), N("Relu") | N("Addmm"), gs.Inputs("inner.*")])
def test_nodes_that_a_checkpoint_makes_in_backward_are_counted_there(
    at: Selector, reentrant: bool
) -> None:
    model = _recomputed(reentrant)

    for number in (2, 3, 4):
        wrong = pytest.raises(LookupError, match=f"{number} sites were expected, found 3: inner")
        with (
            nullcontext() if number == 3 else wrong,
            attached(model, gs.Scale(1.0), at.expect(number)),
        ):
            for _ in range(2):
                model(torch.ones(2, 6, requires_grad=True)).backward()


def test_nodes_that_a_checkpoint_makes_after_the_block_are_not_counted() -> None:
    model, x = _recomputed(True), torch.ones(2, 6, requires_grad=True)
    silent = pytest.warns(gs.SurgeryWarning, match="no gradient ever passed")
    unknown = pytest.warns(gs.SurgeryWarning, match="4 sites were expected, and no backward")
    with silent, unknown, attached(model, gs.Scale(1.0), M("inner.*").expect(4)):
        loss = model(x)
    loss.backward()
    assert x.grad is not None


def test_tensors_without_a_gradient_do_not_count() -> None:
    model = small()
    model.first.requires_grad_(False)
    with attached(model, gs.Scale(1.0), (P() | M("last")).expect(3)) as live:
        backward(model)
    assert sum(entry.calls > 0 for entry in live.ledger) == 3


# Refusals


def test_a_union_provides_what_all_of_its_parts_do_and_an_intersection_what_any_does() -> None:
    with pytest.raises(ValueError, match="needs the value of the tensor"):
        gs.Intervention(gs.ScaleBySign(of="value"), M("act") | N("Relu"))
    gs.Intervention(gs.ScaleBySign(of="value"), M("act") | P())
    both = (M("act") | N("Relu")) & M("*")
    assert both.provides == M().provides
    assert not (~both).provides  # the nodes too
    model = small()
    with attached(model, gs.ScaleBySign(of="value", positive=0.0), both) as live:
        backward(model)
    assert [(entry.site, entry.calls) for entry in live.ledger] == [("act#0", 1)]


# A value


def _big(place: Place) -> bool:
    return isinstance(place.thing, Tensor) and place.thing.numel() > 5


def test_a_combination_is_hashable_and_its_repr_has_no_address() -> None:
    big, same = (P("a*") | M()).where(_big), (P("a*") | M()).where(_big)
    assert (big == same, hash(big) == hash(same), repr(big) == repr(same)) == (True,) * 3
    assert repr(big).endswith(", by=all, test=_big)")
    assert big != (P("a*") | M()).where(lambda place: True)
    assert " at 0x" not in repr(P().where(lambda place: True))
    assert repr(P("a").first(2)) == f"Combined(of=({P('a')!r},), by=all, limit=2)"


# From the command line


def _found(*words: str) -> list[str]:
    register()
    with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
        config = plain(hydra_compose("config", ["transform=clip", *words]))
    experiment = build(config)
    (item,) = experiment.surgery.interventions
    return item.at.find(experiment.make_model())


LINEAR = ("hidden.0.linear", "hidden.1.linear", "output")
WEIGHTS, BIASES = ([f"{name}.{kind}" for name in LINEAR] for kind in ("weight", "bias"))
RELUS = ["hidden.0.relu", "hidden.1.relu"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("site=combined site.of.0.pattern=*.bias site.count=3", BIASES),
        ("site=combined site.of=[{_target_:gradsurg.Outputs,types:ReLU},"
         "{_target_:gradsurg.Parameters,size:[10,64]}]", RELUS + BIASES),
        ("site.depth=[2,3] site.ndim=1", BIASES[:2]),
    ],
)  # fmt: skip
def test_the_command_line_selects_the_same_sites_as_python(words: str, expected: list[str]) -> None:
    assert _found(*words.split()) == expected


def test_a_part_of_an_intersection_that_matches_nothing_is_named() -> None:
    part = gs.Outputs("frist")
    with pytest.raises(SelectionError, match="did you mean 'first'") as caught:
        (gs.Outputs("first") & part).find(small())
    assert caught.value.owner is part
