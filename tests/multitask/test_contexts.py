"""Both engines where training is not plain: accumulation, AMP, checkpoints, compiled models."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsurg as gs
from gradsurg.aggregators.base import (
    Aggregator,
    AggregatorContext,
    AggregatorProperty,
    AggregatorState,
    Entrywise,
)
from gradsurg.aggregators.base import losses_of as losses_known
from gradsurg.core.live import Live
from gradsurg.multitask.conflict import Conflict
from gradsurg.plugins.fields import validated
from gradsurg.plugins.registry import names
from tests.aggregators.cases import made
from tests.multitask.nets import (
    ENGINES,
    TARGETS,
    Net,
    Running,
    Uneven,
    at_shared,
    close,
    grads_of,
    inputs,
    joint,
    losses_of,
    oracle,
    same,
    scaled,
    still,
    trained,
)

TRUNK = ["trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias"]


# Several batches are one step


@validated
class ByLosses(Running):
    """The losses are the weights."""

    def update(
        self, gramian: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return losses_known(self, context, len(gramian)), state


def test_the_context_has_the_summed_losses_of_several_batches() -> None:
    model = Net()
    with gs.Surgery(at_shared(ByLosses())).attach(model) as live:
        for step in range(3):
            live.backward(losses_of(model, step), aggregate=step == 2)
    (conflict,) = live.conflicts.fetch()
    total = [sum(losses_of(model, step)[t].item() for step in range(3)) for t in "abc"]
    assert conflict.weights == pytest.approx(total)


@pytest.mark.parametrize("given", ["a b c", "abc ab", "ab bc", "b ac b", "c c ab"])
def test_each_batch_of_a_step_may_have_other_tasks(given: str) -> None:
    model, found = Net(), []
    batches = given.split()
    tasks = list(dict.fromkeys("".join(batches)))
    with gs.Surgery(at_shared(Uneven())).attach(model) as live:
        for _ in range(2):  # the second time in the room of the first
            model.zero_grad()
            for step, names in enumerate(batches):
                losses = {task: losses_of(model, step)[task] for task in names}
                live.backward(losses, aggregate=step == len(batches) - 1)
            found.append(grads_of(model))
            (conflict,) = live.conflicts.fetch()
            assert conflict.tasks == tasks
    together = {
        task: sum(losses_of(model, i)[task] for i, own in enumerate(batches) if task in own)
        for task in tasks
    }
    assert same(*found)
    close(found[0], oracle(model, together, [(Uneven(), TRUNK)]))


@pytest.mark.filterwarnings("ignore::gradsurg.SurgeryWarning")  # of a block that made no update
def test_a_stateful_transform_is_refused_for_batches_of_other_tasks() -> None:
    model = Net()
    item = gs.Intervention(gs.GrokfastEMA(), at=gs.Parameters("trunk.0.weight"))
    with gs.Surgery(item, at_shared(Uneven())).attach(model) as live:
        live.backward({"a": losses_of(model)["a"]}, aggregate=False)
        with pytest.raises(ValueError, match="which 2 tasks would share"):
            live.backward({"b": losses_of(model)["b"]})


def test_batches_with_weighted_losses_need_the_same_tasks() -> None:
    model = Net()
    with gs.Surgery(at_shared(gs.Mean())).attach(model) as live:
        live.backward(losses_of(model), aggregate=False)
        with pytest.raises(ValueError, match="the first one had a, b, c, found a, b"):
            live.backward({task: losses_of(model)[task] for task in "ab"})
        live.backward({task: losses_of(model)[task] for task in "ab"})


def test_pending_gradients_can_be_discarded() -> None:
    model = Net()
    optimizer = still(model)

    def fail(live: Live) -> None:
        with pytest.raises(ZeroDivisionError) as error:
            live.backward(failing(model))
        assert "were dropped" in "".join(error.value.__notes__)

    drops = [
        lambda live: live.discard(),
        lambda live: optimizer.step(),
        fail,
        lambda live: None,
    ]
    for number, drop in enumerate(drops):
        model.zero_grad()
        with (
            warnings.catch_warnings(),
            gs.Surgery(at_shared(Uneven())).attach(model, optimizer) as live,
        ):
            warnings.simplefilter("ignore", gs.SurgeryWarning)
            live.backward(losses_of(model, 1), aggregate=False)
            drop(live)
            live.backward(losses_of(model, 2))
            live.discard()
        found, expected = grads_of(model), oracle(model, losses_of(model, 2), [(Uneven(), TRUNK)])
        assert all(torch.allclose(found[n], expected[n]) for n in TRUNK) == (number < 3)


def failing(model: Net) -> dict[str, Tensor]:
    losses = losses_of(model)
    losses["b"].register_hook(lambda grad: 1 / 0)
    return losses


def test_freezing_a_parameter_between_batches_is_refused() -> None:
    model = Net()
    with gs.Surgery(at_shared(Uneven())).attach(model) as live:
        live.backward(losses_of(model), aggregate=False)
        model.trunk[0].weight.requires_grad_(False)
        with pytest.raises(
            ValueError, match="only after .*: it changed between two live.backward calls"
        ):
            live.backward(losses_of(model))
        live.backward(losses_of(model))
    close(grads_of(model), oracle(model, losses_of(model), [(Uneven(), TRUNK[1:])]))


# Automatic mixed precision


def _scaler(growth: float = 2.0**14) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=growth)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["running", "of losses"])
def test_a_loss_scale_changes_nothing(name: str, engine: str) -> None:
    aggregator = {"running": Running(), "of losses": gs.GradNorm()}[name]

    def train(scaler: torch.amp.GradScaler | None) -> tuple[Net, list[Conflict]]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        surgery = gs.Surgery(at_shared(aggregator, **ENGINES[engine]))
        with surgery.attach(model, optimizer, scaler=scaler) as live:
            for step in range(3):
                optimizer.zero_grad()
                losses = losses_of(model, step)
                if scaler is None:
                    live.backward(losses)
                    optimizer.step()
                    continue
                live.backward({task: scaler.scale(loss) for task, loss in losses.items()})
                scaler.step(optimizer)
                scaler.update()
            return model, live.conflicts.fetch()

    (plain, first), (scaled, second) = train(None), train(_scaler())
    close(dict(scaled.state_dict()), dict(plain.state_dict()))
    for own, other in zip(second, first, strict=True):
        assert own.norms == pytest.approx(other.norms, rel=1e-4)
        assert own.decrease == pytest.approx(other.decrease, rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_overflows_is_skipped_and_changes_no_state(engine: str) -> None:
    model, scaler = Net(), _scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    surgery = gs.Surgery(at_shared(Running(), **ENGINES[engine]))
    with surgery.attach(model, optimizer, scaler=scaler) as live:
        for step in range(3):
            optimizer.zero_grad()
            before = [own.detach().clone() for own in model.parameters()]
            losses = {task: scaler.scale(own) for task, own in losses_of(model, step).items()}
            if step == 1:
                losses["b"] = losses["b"] * float("inf")
            live.backward(losses)
            scaler.step(optimizer)
            scaler.update()
            moved = any(
                not torch.equal(own, other)
                for own, other in zip(before, model.parameters(), strict=True)
            )
            assert moved == (step != 1)
        assert live.step == 2
        assert len(live.conflicts.fetch()) == 2
    states = surgery.state_dict()["states"]
    (norms,) = [own["norms"] for name, own in states.items() if not name.endswith("/tasks")]  # pyright: ignore
    assert norms.isfinite().all()
    assert scaler.get_scale() == 2.0**13


def test_a_scaler_that_attach_was_not_given_warns() -> None:
    model, scaler = Net(), _scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gs.Surgery(at_shared(Uneven())).attach(model, optimizer) as live:
        for _ in range(2):
            live.backward({t: scaler.scale(own) for t, own in losses_of(model).items()})
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                scaler.step(optimizer)
            scaler.update()
            said = [str(one.message) for one in told]
            assert [("attach was not given" in one) for one in said] == [True] * (live.step == 1)
        first, second = live.conflicts.fetch()
        assert first.norms[0] > 1000 * second.norms[0]


@validated
class Bounded(Entrywise):
    """The sum of the tasks, no entry of which is beyond a bound."""

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset({"deterministic"})

    def apply(self, rows: Tensor, context: AggregatorContext) -> Tensor:
        return rows.sum(0).clamp(-0.1, 0.1)


@validated
class Whole(Aggregator):
    """The same of all the rows at once."""

    @property
    def properties(self) -> frozenset[AggregatorProperty]:
        return frozenset({"deterministic"})

    def init(self, num_tasks: int) -> AggregatorState:
        return {}

    def merge(
        self, rows: Tensor, state: AggregatorState, context: AggregatorContext
    ) -> tuple[Tensor, AggregatorState]:
        return rows.sum(0).clamp(-0.1, 0.1), state


@pytest.mark.parametrize("aggregator", [Bounded(), Whole()], ids=repr)
def test_an_aggregator_that_is_not_homogeneous_is_refused_under_a_loss_scale(
    aggregator: Aggregator,
) -> None:
    model, surgery = Net(), gs.Surgery(at_shared(aggregator))
    said = rf"{type(aggregator).__name__}\(\) depends on the size .* loss scale.*'homogeneous'"
    with pytest.raises(ValueError, match=said), surgery.attach(model, scaler=_scaler()):
        pass
    off = torch.amp.GradScaler("cpu", enabled=False)
    with surgery.attach(model, scaler=off) as live:
        live.backward(losses_of(model))
    # A scaler that attach was not given is noticed.
    scaler, optimizer = _scaler(), torch.optim.SGD(model.parameters(), lr=0.01)
    with surgery.attach(model, optimizer) as live:
        live.backward({t: scaler.scale(own) for t, own in losses_of(model).items()})
        with pytest.warns(gs.SurgeryWarning, match=f"GradScaler that attach was not given. {said}"):
            scaler.step(optimizer)


@pytest.mark.filterwarnings("ignore:.*by their order. To choose by name")
def test_every_aggregator_of_the_catalogue_works_under_a_loss_scale_or_is_refused() -> None:
    for stem in names("aggregators"):
        fields = {"weights": [1.0, 2.0, 3.0]} if stem == "fixed_weights" else {}
        aggregator = made(stem, **fields)
        tasks = ("a", "b") if stem == "agem" else ("a", "b", "c")
        model, scaler = Net(tasks), _scaler()
        surgery = gs.Surgery(at_shared(aggregator))
        if stem == "excess_mtl":  # its accumulators know the size of the gradients
            with pytest.raises(ValueError, match="size of the gradients, which the loss scale"):
                surgery.attach(model, still(model), scaler=scaler)
            continue
        with surgery.attach(model, still(model), scaler=scaler) as live:
            live.backward({t: scaler.scale(own) for t, own in losses_of(model).items()})
        found = grads_of(model)
        model.zero_grad()
        with gs.Surgery(at_shared(aggregator)).attach(model, still(model)) as live:
            live.backward(losses_of(model))
        close(found, {name: own * 2.0**14 for name, own in grads_of(model).items()}, rtol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_does_not_affect_the_aggregation(engine: str) -> None:
    def losses(model: Net) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs())
        return {t: (own.float() - TARGETS[t]).square().mean() for t, own in outputs.items()}

    model = Net()
    item = at_shared(Uneven(), **ENGINES[engine])
    with gs.Surgery(item).attach(model) as live:
        live.backward(losses(model))
        found = grads_of(model)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            live.backward(losses(model))
    assert same(found, grads_of(model))
    weighed = {}
    for name in ("outside", "inside"):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "inside"):
            items = gs.Intervention(gs.Scale(1.0), when=gs.ForTask("a")), at_shared(gs.Mean())
            weighed[name], _ = joint(model, losses(model), *items)
    assert same(weighed["inside"], weighed["outside"])


# Models


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())


class Recurrent(Net):
    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.trunk = self.kind(1, 6, num_layers=2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        states, _ = self.trunk(x.T[:, :, None])
        return {
            task: head(states[-1] if task == "a" else states.mean(0))
            for task, head in self.heads.items()
        }


class Convolved(Net):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv1d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x[:, None])
        return {task: head(features) for task, head in self.heads.items()}


MODELS = {"batch norm": Normed, "lstm": Recurrent, "convolution": Convolved}


@pytest.mark.parametrize("name", MODELS)
def test_the_full_engine_equals_the_result_by_hand(name: str) -> None:
    model = MODELS[name]()
    names = [own for own, _ in model.named_parameters() if own.startswith("trunk")]
    state = {key: own.clone() for key, own in model.state_dict().items()}
    found, _ = joint(model, losses_of(model), at_shared(Uneven()))
    after = {key: own.clone() for key, own in model.state_dict().items()}
    model.load_state_dict(state)
    close(found, oracle(model, losses_of(model), [(Uneven(), names)]))
    assert same(after, model.state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_the_feature_engine_uses_the_weights_that_it_logs(name: str) -> None:
    model = MODELS[name]()
    with gs.Surgery(at_shared(Uneven(), **ENGINES["feature"])).attach(model) as live:
        live.backward(losses_of(model))
    found = grads_of(model)
    (conflict,) = live.conflicts.fetch()
    model.zero_grad()
    losses = losses_of(model).values()
    sum(weight * loss for weight, loss in zip(conflict.weights, losses, strict=True)).backward()
    expected = grads_of(model)
    trunk = [key for key in found if key.startswith("trunk")]
    close({key: found[key] for key in trunk}, {key: expected[key] for key in trunk})


class Checkpointed(Net):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.requires_grad_()
        features = checkpoint(self.trunk, x, use_reentrant=self.reentrant)
        assert isinstance(features, Tensor)
        features = self.act(features)
        return {task: head(features) for task, head in self.heads.items()}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_changes_nothing(engine: str) -> None:
    item = at_shared(Uneven(), **ENGINES[engine])
    close(trained(Checkpointed(), item), trained(Net(), item))


class Recounted(Net):
    """Its trunk counts batches, in a forward that each backward makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.insert(1, nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = checkpoint(self.trunk, x, use_reentrant=False)
        assert isinstance(features, Tensor)
        return {task: head(features) for task, head in self.heads.items()}


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("aggregator", [gs.Mean(), Uneven(), None], ids=repr)
def test_a_checkpoint_updates_running_statistics_once(
    aggregator: Aggregator | None, every: int
) -> None:
    plain, model = Recounted(), Recounted()
    optimizers = [still(plain), still(model)]
    items = [at_shared(aggregator)] if aggregator else [scaled(1.0, gs.Parameters("*"), "b")]
    with gs.Surgery(*items).attach(model, optimizers[1], effects_every=every) as live:
        for step in range(3):
            sum(losses_of(plain, step).values()).backward()
            live.backward(losses_of(model, step))
    for own, other in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(own, other)


def test_a_reentrant_checkpoint_is_refused_with_instructions() -> None:
    model = Checkpointed()
    model.reentrant = True
    rule = "use_reentrant=False.*a reentrant checkpoint.*engine='feature'"
    with pytest.raises(RuntimeError, match=rule):
        joint(model, losses_of(model), at_shared(Uneven()))


def test_measuring_skips_a_reentrant_checkpoint_with_a_warning() -> None:
    model, plain = Checkpointed(), Net()
    model.reentrant = True
    with pytest.warns(gs.SurgeryWarning, match="their conflicts are not measured"):
        found, _ = joint(model, losses_of(model), at_shared(gs.Mean()))
    close(found, joint(plain, losses_of(plain), at_shared(gs.Mean()))[0])


def test_a_reentrant_checkpoint_in_a_head_is_refused() -> None:
    model = Net()
    with gs.Surgery(at_shared(Uneven(), **ENGINES["feature"])).attach(model) as live:
        features = model.trunk(inputs())
        losses = {
            task: checkpoint(head, features, use_reentrant=True).square().mean()  # pyright: ignore
            for task, head in model.heads.items()
        }
        with pytest.raises(RuntimeError, match="losses.'a'.*the head has a reentrant"):
            live.backward(losses)
        live.backward(losses_of(model))


def test_a_checkpoint_below_the_representation_may_be_reentrant() -> None:
    model, item = Checkpointed(), at_shared(Uneven(), engine="feature", features="act")
    expected = trained(model, item)
    model.reentrant = True
    close(trained(model, item), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("what", "engine", "backend"),
    [
        ("model", "full", "aot_eager"),
        ("trunk", "feature", "aot_eager"),
        pytest.param("trunk", "full", "inductor", marks=pytest.mark.full),
        pytest.param("trunk", "feature", "inductor", marks=pytest.mark.full),
    ],
)
def test_a_compiled_model_gives_the_gradients_of_an_eager_one(
    what: str, engine: str, backend: str
) -> None:
    model, plain = Net(), Net()
    made: nn.Module = model
    if what == "model":
        made = torch.compile(model, backend=backend)  # pyright: ignore[reportAssignmentType]
    else:
        model.trunk = torch.compile(model.trunk, backend=backend)  # pyright: ignore
    item = at_shared(Uneven(), **ENGINES[engine])
    for net, called in ((model, made), (plain, plain)):
        with gs.Surgery(item).attach(called) as live:
            for step in range(2):
                net.zero_grad()
                live.backward(losses_of(called, step))
    expected = grads_of(plain)
    found = {key.replace("_orig_mod.", ""): own for key, own in grads_of(model).items()}
    close(found, expected, rtol=1e-4)


RETAINED = {name: [at_shared(Uneven(), **fields)] for name, fields in ENGINES.items()}
RETAINED |= {"mean": [at_shared(gs.Mean())], "none": []}


@pytest.mark.parametrize("name", RETAINED)
def test_a_retained_graph_supports_another_backward(name: str) -> None:
    model, items = Net(), RETAINED[name]
    expected = trained(model, *items)
    model.zero_grad()
    with gs.Surgery(*items).attach(model) as live:
        losses = losses_of(model)
        live.backward(losses, retain_graph=True)
        assert same(grads_of(model), expected)
        live.backward({"a": losses["a"]}, retain_graph=True)
        model.zero_grad()
        live.backward(losses)
        assert same(grads_of(model), expected)
        with pytest.raises(RuntimeError, match="second time"):
            live.backward(losses)


def test_a_loss_that_holds_a_gradient_is_differentiated_through_it() -> None:
    model = Net()

    def losses() -> dict[str, Tensor]:
        x = inputs().requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs["a"].sum(), x, create_graph=True)
        return {"a": slope.square().mean(), "b": outputs["b"].square().mean()}

    found, _ = joint(model, losses(), at_shared(Uneven()))
    close(found, oracle(model, losses(), [(Uneven(), TRUNK)]))
    assert all(own is None or not own.requires_grad for own in found.values())
