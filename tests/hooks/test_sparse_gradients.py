"""Sparse gradients: transforms that keep zero act on their values, others are refused."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradsurg as gs
from gradsurg.sites.places import Selector
from gradsurg.testing.transforms import context_with
from gradsurg.transforms.base import Transform
from tests.nets import attached, grad_of, sgd
from tests.transforms.cases import build, names

WORDS = torch.tensor([[1, 4, 1], [0, 4, 4]])
STAGES = ("backward", "accumulated", "step")
# torch 2.12 warns of invariants that are not checked also where `check_invariants` is given.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
RULE = "elementwise .* keeps zero"


def _model(sparse: bool = True, *, bag: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    kind, more = (nn.EmbeddingBag, {"mode": "sum"}) if bag else (nn.Embedding, {})
    return nn.Sequential(kind(6, 3, sparse=sparse, **more), nn.Linear(3, 2))


def _gradient(
    model: nn.Sequential, transform: Transform, at: Selector, when: gs.Trigger | None = None
) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, transform, at, optimizer, when):
        (model(WORDS) * 3).square().sum().backward()
        optimizer.step()
    return grad_of(model[0].weight)


def _keeps_zero(transform: Transform) -> bool:
    """Whether it gives zero for zero, entry by entry, with the same result at every call."""
    if "elementwise" not in transform.properties or transform.init(torch.zeros(2)):
        return False
    zero = torch.zeros(50)
    return not any(
        transform.update(zero, {}, context_with(torch.ones(50), step))[0].any() for step in (0, 500)
    )


SITES = [name for name in names() if build(name).needs <= {"value"}]
ACTING = [name for name in SITES if _keeps_zero(build(name))]


def test_some_transforms_act_and_some_do_not() -> None:
    assert {"clip", "scale", "sign", "zero", "sanitize", "random_mask", "chain"} <= {*ACTING}
    assert not {"clip_norm", "mask", "add_noise", "grokfast_ema", "clip_global_norm"} & {*ACTING}


@pytest.mark.parametrize(
    ("name", "stage"),
    [*((name, STAGES[0]) for name in ACTING if name != "random_mask"), *product(["clip"], STAGES)],
)
def test_the_values_of_a_sparse_gradient_become_those_of_the_dense_one(name, stage) -> None:
    transform, at = build(name), gs.Parameters("0.weight", stage=stage)
    dense = _gradient(_model(sparse=False), transform, at)
    sparse = _gradient(_model(), transform, at)
    assert sparse.is_sparse
    assert sorted(sparse.coalesce().indices().tolist()[0]) == [0, 1, 4]
    torch.testing.assert_close(sparse.to_dense(), dense)


@pytest.mark.parametrize("name", [name for name in SITES if name not in ACTING])
def test_other_transforms_are_refused_when_attached(name: str) -> None:
    transform = build(name)
    at = gs.Parameters("0.weight", stage="step" if transform.scope == "group" else "backward")
    for bag in (False, True):
        model = _model(bag=bag)
        with (
            pytest.raises(ValueError, match=rf"site '0\.weight': .*sparse.*{RULE}"),
            attached(model, transform, at, sgd(model)),
        ):
            pytest.fail("it was attached")


def test_a_parameter_with_a_dense_gradient_beside_a_sparse_one_is_not_refused() -> None:
    model = _model()
    with attached(model, gs.ClipNorm(0.1), gs.Parameters("1.*")):
        model(WORDS).sum().backward()
    assert grad_of(model[1].weight).norm() == pytest.approx(0.1)
    # A tied weight that a layer uses too has the dense sum.
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 6, bias=False))
    model[1].weight = model[0].weight
    with attached(model, gs.ClipNorm(0.1), gs.Parameters()):
        model(WORDS).sum().backward()
    assert grad_of(model[1].weight).norm() == pytest.approx(0.1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(WORDS).sum().backward()
    optimizer.step()


class Table(nn.Module):
    """A plain parameter that a function looks up: nothing but its gradient shows that."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, 3))
        self.sparse = True

    def forward(self, words: Tensor) -> Tensor:
        return functional.embedding(words, self.table, sparse=self.sparse)


@pytest.mark.parametrize("stage", STAGES)
def test_a_sparse_gradient_is_refused_at_the_first_backward_if_nothing_shows_it(stage) -> None:
    model = Table()
    optimizer = sgd(model)
    with (
        pytest.raises(TypeError, match=rf"site 'table'.*ClipNorm.*sparse.*{RULE}"),
        attached(model, gs.ClipNorm(1.0), gs.Parameters(stage=stage), optimizer),
    ):
        _step(model, optimizer)
    with attached(model, gs.Scale(2.0), gs.Parameters(stage=stage), optimizer):
        _step(model, optimizer)
    assert grad_of(model.table).to_dense()[:, 0].tolist() == [2.0, 4.0, 0.0, 0.0, 6.0, 0.0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("effects_every", [0, 1])
def test_a_gradient_may_become_sparse_after_a_dense_one(stage: str, effects_every: int) -> None:
    model = Table()
    optimizer = sgd(model)
    surgery = gs.Surgery(gs.Intervention(gs.Clip(1.5), gs.Parameters(stage=stage)))
    with surgery.attach(model, optimizer, effects_every=effects_every):
        for model.sparse in (False, True, False, True):
            _step(model, optimizer)
            assert grad_of(model.table).is_sparse is model.sparse
            clipped = [1.0, 1.5, 0.0, 0.0, 1.5, 0.0]
            assert grad_of(model.table).to_dense()[:, 0].tolist() == clipped


@pytest.mark.parametrize(
    ("transform", "at"),
    [
        *((gs.ClipNorm(1.0), gs.Parameters(stage=stage)) for stage in STAGES),
        (gs.GrokfastEMA(), gs.Parameters()),
        (gs.Chain(gs.Clip(1.0), gs.ClipNorm(1.0)), gs.Parameters()),
        (gs.ClipGlobalNorm(1.0), gs.Parameters(stage="step")),
        (gs.ClipGlobalNorm(1.0), gs.Parameters(stage="backward_end")),
    ],
)
def test_a_sparse_gradient_is_refused_after_a_dense_one(transform: Transform, at: Selector) -> None:
    model = Table()
    optimizer = sgd(model)
    with (
        pytest.raises(TypeError, match=rf"site 'table'.*sparse.*{RULE}"),
        attached(model, transform, at, optimizer),
    ):
        for model.sparse in (False, True):
            _step(model, optimizer)
    assert not model.table._backward_hooks


def test_a_mask_at_random_keeps_or_drops_values() -> None:
    model = _model()
    plain = _gradient(_model(), gs.Identity(), gs.Parameters("0.weight")).coalesce().values()
    mask = gs.Mask(0.5, by="random", rescale=True)
    result = _gradient(model, mask, gs.Parameters("0.weight")).coalesce().values()
    kept = result != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(result[kept], 2 * plain[kept])


def test_the_effect_on_a_sparse_gradient_is_that_on_its_values() -> None:
    model = _model()
    with attached(model, gs.Scale(0.5), gs.Parameters("0.weight")) as live:
        for _ in range(2):
            model(WORDS).sum().backward()
        (row,) = live.effects.rows()
    assert row["sampled"] == 2
    assert float(str(row["norm_after"])) == pytest.approx(0.5 * float(str(row["norm_before"])))
    assert row["changed"] == 1
