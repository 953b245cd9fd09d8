"""AGEM and GEM: which loss is the memory, by its name or by the order."""

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator, NormMatchedSum
from gradsurg.plugins.fields import FieldError

CONFLICT = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])  # of the current data, and of a memory


@pytest.mark.parametrize(
    "aggregator",
    [gs.AGEM(memory="retain"), gs.GEM(memory="retain"), gs.GEM(memory=("other", "retain"))],
    ids=repr,
)
def test_a_named_memory_is_the_memory_in_any_order_and_batch(aggregator: Aggregator) -> None:
    """(1, 0) turned away from (-1, 1) is (1/2, 1/2); the other way round it would be (0, 1)."""
    forget, retain = CONFLICT
    assert stepped(aggregator, {"forget": forget, "retain": retain}) == [0.5, 0.5]
    assert stepped(aggregator, {"retain": retain, "forget": forget}) == [0.5, 0.5]
    assert stepped(aggregator, {"retain": retain}, {"forget": forget}) == [0.5, 0.5]


def test_three_nearly_dependent_gradients_are_projected_by_their_names_too() -> None:
    """The rows path, which sorts the rows by their norms."""
    retain = torch.tensor([-1.0, 1.0])
    losses = {"a": retain, "now": CONFLICT[0], "b": retain * (1 + 1e-9)}
    found = stepped(gs.GEM(memory=("a", "b")), losses)
    assert found == pytest.approx([0.5, 0.5], abs=1e-5)


@pytest.mark.parametrize(
    ("aggregator", "message"),
    [
        (gs.AGEM(memory="retian"), r"^AGEM.memory: .* There is no loss 'retian'. .* forget, "),
        (gs.GEM(memory="retian"), r"^GEM.memory: did you mean 'retain'\? "),
        (gs.GEM(memory=["retain"]), "^GEM.memory: must name all losses but one, forget, other "),
    ],
    ids=repr,
)
def test_a_memory_that_is_not_there_is_an_error_with_the_losses(
    aggregator: Aggregator, message: str
) -> None:
    losses = dict(zip(("forget", "retain"), CONFLICT, strict=True))
    if message.endswith("other "):
        losses["other"] = CONFLICT[1]
    with pytest.raises(FieldError, match=message):
        stepped(aggregator, losses)
    with pytest.raises(FieldError, match="memory: is by name, and the call has no task names"):
        aggregator(CONFLICT)


@pytest.mark.parametrize(
    ("aggregator", "names", "message"),
    [
        (gs.AGEM(), ("retain", "forget"), "'forget', the last loss, is the memory, and 'retain'"),
        (gs.GEM(), ("a", "b", "memory"), "'b', 'memory', the later losses, are memories, and 'a'"),
        (NormMatchedSum(gs.AGEM()), ("memory", "now"), "'now', the last loss, is the memory"),
    ],
    ids=repr,
)
def test_without_a_name_the_order_is_told_once(
    aggregator: Aggregator, names: tuple[str, ...], message: str
) -> None:
    losses = {name: CONFLICT[min(number, 1)] for number, name in enumerate(names)}
    with pytest.warns(gs.SurgeryWarning, match=message) as caught:
        found = stepped(aggregator, losses, times=3)
    assert len(caught) == 1
    if not isinstance(aggregator, NormMatchedSum):
        assert found == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("losses", [("now", "memory"), ("now", "memory_1", "memory_2"), None])
def test_no_warning_where_the_names_agree_with_the_order_or_there_are_none(
    losses: tuple[str, ...] | None,
) -> None:
    """Warnings are errors in these tests."""
    names = losses or ("0", "1")
    given = {name: CONFLICT[min(number, 1)] for number, name in enumerate(names)}
    assert stepped(gs.GEM(), given) == pytest.approx([0.5, 0.5])


def test_a_state_of_before_the_field_memory_is_loaded() -> None:
    for aggregator, name in ((gs.AGEM(), "AGEM()"), (gs.GEM(), "GEM(margin=0.0)")):
        assert repr(aggregator) == name
    assert repr(gs.AGEM(memory="a")) == "AGEM(memory='a')"


def stepped(aggregator: Aggregator, *batches: dict[str, Tensor], times: int = 1) -> list[float]:
    """Return the gradient of two weights after backward passes of losses with these gradients."""
    model = nn.Linear(2, 1, bias=False)
    intervention = gs.Intervention(aggregator, at=gs.SharedParameters())
    with gs.Surgery(intervention).attach(model) as live:
        for _ in range(times):
            model.zero_grad()
            for number, gradients in enumerate(batches, 1):
                losses = {name: model(gradient).sum() for name, gradient in gradients.items()}
                live.backward(losses, aggregate=number == len(batches))
    assert model.weight.grad is not None
    return model.weight.grad[0].tolist()
