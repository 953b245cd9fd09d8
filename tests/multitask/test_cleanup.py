"""Nothing is left of an aggregator after an error and after the block."""

import gc
from weakref import ref

import pytest
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator
from tests.multitask.nets import (
    ENGINES,
    Net,
    Running,
    Uneven,
    at_shared,
    grads_of,
    losses_of,
    same,
    scaled,
    still,
)
from tests.nets import num_hooks

# State that is left


class Failing(nn.Module):
    """Its head b fails in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = self.net(x)

        def fail(grad: Tensor) -> None:
            raise RuntimeError("in the middle")

        outputs["b"].register_hook(fail)
        return outputs


@pytest.mark.parametrize("engine", ENGINES)
def test_after_an_error_no_task_is_set_and_no_hook_is_paused(engine: str) -> None:
    model = Failing()
    item = scaled(2.0, gs.Parameters("*"))
    other = scaled(3.0, gs.Parameters("net.heads.a.weight"), "a")
    fields = {**ENGINES[engine]}
    if fields:
        fields["features"] = "net.trunk"
    surgery = gs.Surgery(item, other, at_shared(Uneven(), **fields))
    with surgery.attach(model) as live:
        with pytest.raises(RuntimeError, match="in the middle"):
            live.backward(losses_of(model))
        assert live.clock.task == ""
        assert all(own.is_on for own in live.attachment.operations)
        assert not any(own.skipped_nodes for own in live.attachment.operations)
        assert all(param.grad is None for param in model.parameters())
        net = losses_of(model.net)
        live.backward(net)
        assert live.attachment.has_multi_task
        assert live.attachment.multi_task._builder.pending == {}
    found = grads_of(model.net)
    with gs.Surgery(
        scaled(2.0, gs.Parameters("*")),
        scaled(3.0, gs.Parameters("heads.a.weight"), "a"),
        at_shared(Uneven(), **ENGINES[engine]),
    ).attach(model.net) as live:
        model.zero_grad()
        live.backward(losses_of(model.net))
    assert same(found, grads_of(model.net))


def test_after_an_error_while_measuring_no_hook_is_paused() -> None:
    model = Failing()
    surgery = gs.Surgery(scaled(2.0, gs.Parameters("*")), at_shared(gs.Mean()))
    with surgery.attach(model) as live:
        with pytest.raises(RuntimeError, match="in the middle"):
            live.backward(losses_of(model))
        live.backward(losses_of(model.net))
    assert [entry.all_calls for entry in live.ledger if entry.intervention == "scale"] == [1] * 10


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("engine", ENGINES)
def test_after_the_block_nothing_is_left(engine: str) -> None:
    model = Net()
    before = num_hooks(model)
    optimizer = still(model)
    surgery = gs.Surgery(scaled(2.0, gs.Outputs("trunk.1")), at_shared(Uneven(), **ENGINES[engine]))
    with surgery.attach(model, optimizer) as live:
        losses = losses_of(model)
        live.backward(losses)
        optimizer.step()
    assert num_hooks(model, optimizer) == before
    with pytest.raises(RuntimeError, match="the block has ended"):
        live.backward(losses_of(model))
    kept = [ref(thing) for thing in (model, *model.parameters(), *losses.values())]
    del model, optimizer, losses
    gc.collect()
    assert [held() for held in kept if held() is not None] == []
    assert live.step == 1


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_sixty_attachments_leak_nothing(engine: str) -> None:
    model, kept, counts = Net(), [], []
    for number in range(60):
        optimizer = still(model)
        surgery = gs.Surgery(
            scaled(2.0, gs.Outputs("trunk.1")),
            gs.Intervention(gs.GrokfastEMA(), at=gs.Parameters("trunk.*", stage="accumulated")),
            at_shared(Running(), **ENGINES[engine]),
        )
        with surgery.attach(model, optimizer) as live:
            losses = losses_of(model)
            live.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
        kept += [ref(thing) for thing in (surgery, live, optimizer, *losses.values())]
        del surgery, live, optimizer, losses
        if number in (20, 59):
            gc.collect()
            counts.append(len(gc.get_objects()) - len(kept))
    assert [held() for held in kept if held() is not None] == []
    assert counts[1] - counts[0] < 39, "objects pile up from round to round"


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("aggregator", [Uneven(), gs.Mean()])
def test_no_gradient_is_kept_between_steps(aggregator: Aggregator) -> None:
    model, kept = Net(), list[ref[Tensor]]()
    model.trunk[0].weight.register_hook(lambda grad: kept.append(ref(grad)))
    with gs.Surgery(at_shared(aggregator)).attach(model, still(model)) as live:
        live.backward(losses_of(model))
        model.zero_grad()
        gc.collect()
        assert len(kept) > 1
        assert [held() for held in kept if held() is not None] == []
