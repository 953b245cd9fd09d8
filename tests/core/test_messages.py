"""Errors and warnings: each call, the class, and the names that the text must contain."""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gradsurg as gs
from gradsurg.plugins.fields import FieldError
from gradsurg.sites.places import Place, Selector
from gradsurg.sites.updates import MatchedUpdates
from gradsurg.testing.transforms import context_with
from tests.nets import batch, num_hooks, sgd, small
from tests.sites.points import Acts, Answer, Double, InPlace, Made, recomputed

pytestmark = [
    pytest.mark.filterwarnings("ignore:For backward hooks to be called"),  # of PyTorch
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning"),
]

P, M, N = gs.Parameters, gs.Outputs, gs.Nodes
ZERO, ALWAYS = gs.Zero(), gs.Always()
Call = Callable[[], object]


def item(*args: Any, **fields: Any) -> Call:
    """Make an intervention."""
    return lambda: gs.Intervention(*args, **fields)


def attach(
    at: Selector,
    transform: Any = ZERO,
    model: Callable[[], nn.Module] = small,
    when: gs.Trigger = ALWAYS,
    run: Callable[[nn.Module], object] | None = None,
    **given: Any,
) -> Call:
    """Attach a surgery to a model and train a step; after an error no hook may be left."""

    def call() -> None:
        trained = model()
        before = num_hooks(trained)
        given.setdefault("optimizer", sgd(trained) if [*trained.parameters()] else None)
        surgery = gs.Surgery(gs.Intervention(transform, at, when))
        try:
            with surgery.attach(trained, **given):
                (run or step)(trained)
        finally:
            assert (num_hooks(trained), surgery.is_attached) == (before, False)

    return call


def forward(model: nn.Module) -> None:
    model(batch()[0].requires_grad_())


def backward(model: nn.Module) -> None:
    model(batch()[0].requires_grad_()).sum().backward()


def of_no_gradient(model: nn.Module) -> None:
    model(batch()[0]).sum().backward()


def step(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch()[0])  # nothing can be hooked here
    backward(model)


def live(change: Callable[[gs.Live], object], *transforms: Any) -> Call:
    """Change an attached surgery, which is as it was after an error."""

    def call() -> None:
        model = small()
        with gs.Surgery(*map(gs.Intervention, transforms or (gs.Clip(1.0),))).attach(model) as live:
            before = live.interventions, live.labels, num_hooks(model), [*live.ledger]
            try:
                change(live)
            finally:
                step(model)
                assert (live.interventions, live.labels, num_hooks(model)) == before[:3]
                assert [*live.ledger] == before[3]

    return call


def start(model: Any, *args: Any, **fields: Any) -> Call:
    return lambda: gs.Surgery(gs.Intervention(gs.Zero(), P(stage="step"))).start(
        model, *args, **fields
    )


def loaded(**changes: Any) -> Call:
    def call() -> None:
        surgery = gs.Surgery(gs.Intervention(gs.Scale(2.0)))
        good = {"step": 0, "transforms": surgery.state_dict()["transforms"], "states": {}}
        kept = {key: value for key, value in {**good, **changes}.items() if value is not KeyError}
        surgery.load_state_dict(kept)

    return call


def attached_twice() -> None:
    surgery, model = gs.Surgery(gs.Intervention(gs.Scale(2.0))), small()
    with surgery.attach(model):
        surgery.attach(model)


def frozen() -> nn.Module:
    model = small()
    model.first.requires_grad_(False)
    return model


def exported() -> nn.Module:
    return torch.export.export(small(), (torch.ones(2, 6),)).module()


class Blocks(nn.Module):
    """A list of modules, which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 3)])


def with_block() -> nn.Module:
    model = small()
    model.append(nn.Identity())
    model.block = nn.ReLU()
    return model


def beside_a_teacher() -> Made:
    def forward(self: Made, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.teacher(x)
        return (self.own(x) - y).sum()

    return Made(forward, own=nn.Linear(6, 3), teacher=nn.Linear(6, 3))


def bound(call: Callable[[gs.Live, SGD], object]) -> Call:
    """Call with a surgery that waits for its optimizer, and one of a part of the model."""

    def run() -> None:
        model = small()
        live = gs.Surgery(gs.Intervention(gs.Zero(), P(stage="step"))).start(model)
        try:
            call(live, part := SGD(model.first.parameters(), lr=0.1))
            assert num_hooks(model, part) == 0
        finally:
            live.abort()

    return run


def two(first: str, last: str, clock: bool = False) -> Call:
    """Start with optimizers of two parts of a model, or with one as the clock of the other."""

    def call() -> None:
        model = small()
        one, other = (
            SGD([*model.parameters()] if name == "*" else model.get_submodule(name).parameters())
            for name in (first, last)
        )
        surgery = gs.Surgery(gs.Intervention(gs.Zero(), P(stage="step")))
        surgery.start(model, one, clock=other) if clock else surgery.start(model, [one, other])

    return call


def written(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(Double(), *modules)


def appending(self: Made, x: Tensor) -> Tensor:
    tensors = [x * 1]
    self.append(tensors)
    return tensors[-1]


def append() -> Made:
    return Made(appending, append=Made(lambda self, tensors: tensors.append(tensors[-1] * 2)))


def checkpointed() -> Made:
    return Made(lambda self, x: recomputed(self.inner, x, False), inner=nn.Tanh())


def returning(answer: Callable[[Tensor], Any]) -> Callable[[], Made]:
    return lambda: Made(lambda self, x: self.m(x), m=Made(lambda self, x: answer(x * 2)))


def by_keyword() -> Made:
    return Made(lambda self, x: self.m(input=x * 2), m=nn.Identity())


def deprecated() -> nn.Module:
    model = small()
    model.last.register_backward_hook(lambda module, entering, leaving: None)
    return model


def half_called() -> Made:
    return Made(lambda self, x: self.used(x), used=nn.Linear(6, 2), unused=nn.Linear(6, 2))


def scripted() -> Made:
    inner = torch.jit.script(nn.Sequential(nn.ReLU()))
    return Made(lambda self, x: self.scripted(self.plain(x)), plain=Double(), scripted=inner)


class Thin(gs.Parameters):
    """A subclass of users."""


SCALER = torch.amp.GradScaler("cpu")
RELU_VALUE = gs.ScaleBySign(of="value")
CLIPS = gs.Chain(gs.Clip(), gs.ClipGlobalNorm())


OF_SIZE = (gs.Threshold(above=1.0), gs.Steps() & ~gs.Threshold(above=1.0, measure="norm"))
NOT_OF_SIZE = (
    *(gs.Threshold(above=0.1, measure="nan"), gs.AllSameSign(), gs.Shape(above=1, source="grad")),
    *(gs.Threshold(above=1.0, source=source) for source in ("batch", "value")),
)


def scaled(when: gs.Trigger, stage: Any = None) -> Call:
    """Start with a trigger where gradients are scaled; not at stage "step"."""

    def call() -> None:
        surgery = gs.Surgery(gs.Intervention(gs.GradientReversal(), P(stage=stage), when))
        surgery.start(model := small(), sgd(model), scaler=SCALER).abort()

    return call


def _leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


OTHERS: tuple[Any, ...] = (3, None, P, "first.*")


ALL = "first.weight first.bias last.weight last.bias"
NEAREST = {
    "first": "'first.bias'",
    "first.w": "'first.weight'",
    "weight": "'last.weight'",
    "re:first": "'re:first.bias'",
    "FIRST.*": "'first.bias'",
    "frst.*": "'first.*'",
    "first.wieght": "'first.weight'",
    "*.wieght": "'*.weight'",
}
KINDS = (M, gs.Inputs, gs.Activations, gs.SavedTensors, gs.ModuleGradients, gs.Captured)


def lbfgs(*args: Any) -> Call:
    def call() -> None:
        model = small()
        gs.Surgery(gs.Intervention(*args)).start(model, torch.optim.LBFGS(model.parameters()))

    return call


def in_two(at: Selector) -> Call:
    """Start a transform of a group at the parameters of two optimizers."""

    def call() -> None:
        model = small()
        halves = [sgd(model.first), sgd(model.last)]
        gs.Surgery(gs.Intervention(gs.ClipGlobalNorm(), at)).start(model, halves)

    return call


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))


def of_complex() -> nn.Module:
    weight = nn.Parameter(torch.ones(6, dtype=torch.complex64))
    return Made(lambda self, x: (self.w * x).abs().sum(), w=weight)


UNLIKE: dict[str, Callable[[Tensor], Any]] = {
    "found [1,": lambda grad: grad[:1],
    "found torch.float64": Tensor.double,
    "found NoneType": lambda grad: None,
    "found float": lambda grad: 1.0,
    "found ndarray": Tensor.numpy,
}
"""Results of transforms unlike the gradient, by their descriptions."""


def first_call(place: Place) -> bool:
    return place.call == 0


def config(*args: Any) -> Call:
    return gs.Surgery(gs.Intervention(gs.Clip()), gs.Intervention(*args)).to_config


def times(grad: Tensor, factor: float) -> Tensor:
    return grad * factor


def of_closure() -> Callable[[Tensor], Tensor]:
    def inner(grad: Tensor) -> Tensor:
        return grad

    return inner


TWO = "interventions.1."


def route(labels: Sequence[Any], shape: tuple[int, ...] = (2, 3), **fields: int) -> Call:
    """Give labels, and train with a transform that reads them, at a linear layer of 4 units."""

    def call() -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        transform = gs.Route(((0,), (1,)), **fields)
        with gs.Surgery(gs.Intervention(transform, M("0"))).attach(model) as live:
            for each in labels:
                live.set_example_labels(each)
            model(torch.ones(shape)).sum().backward()

    return call


def routed(*shape: int, **fields: int) -> Call:
    return lambda: gs.Route(**fields).apply(torch.ones(shape), context_with(torch.ones(shape)))


def double(grad: Tensor) -> Tensor:
    return grad * 2


CHAIN = gs.Chain(gs.Scale(2.0), gs.Clip(5.0))


ERRORS: dict[type[Exception], list[tuple[Call, str]]] = {
    TypeError: [
        (item(3), "3"),
        (item(gs.Clip), "Clip()"),
        (item(gs.Zero(), at="*.weight"), "selector"),
        (item(gs.Zero(), when=5), "trigger"),
        (lambda: gs.Surgery([gs.Intervention(gs.Zero())]), "list Surgery(*interventions)"),
        (lambda: gs.Surgery(gs.Zero()), "Zero"),
        (lambda: gs.hook(None, gs.Zero()), "None"),
        *((lambda other=other: P() | other, "selector") for other in OTHERS),
        *((lambda other=other: P() & other, "selector") for other in OTHERS),
        (route([[0, 1]]), "tensor integers"),
        (route([torch.ones(2)]), "[n] time] torch.float32"),
        (config(gs.Clip(), N("Relu").where(first_call)), f"{TWO}site where(first_call)"),
        (
            config(gs.Clip(), N("Relu") | N("Mul").where(first_call)),
            f"{TWO}site.of.1 where(first_call)",
        ),
        (config(lambda grad: grad), f"{TWO}transform <lambda>"),
        (config(of_closure()), f"{TWO}transform inner"),
        (config(gs.Chain(gs.Sign(), of_closure())), f"{TWO}transform.links.1 inner"),
        (config(partial(times, 0.1)), f"{TWO}transform functools.partial("),
        (config(nn.ReLU()), f"{TWO}transform ReLU()"),
        (start(small(), 3), "torch.optim.Optimizer 3"),
        (start(SGD(small().parameters()), small()), "SGD model"),
        (start(nn.Linear), "torch.nn.Module Linear"),
        (start("mlp"), "torch.nn.Module 'mlp'"),
        *(
            (live(lambda live, wrong=wrong: live.bind(wrong)), f"Optimizer {name}")
            for wrong, name in ((None, "None"), (nn.Linear(1, 1), "Linear"), ("adam", "'adam'"))
        ),
        (attach(P(), gs.Clip(), model=of_complex), "'w' torch.complex64"),
        *(
            (
                attach(P("first.weight"), gs.Chain(gs.Identity(), Acts(wrong))),
                f"acts: 'first.weight', step 0, {found}",
            )
            for found, wrong in UNLIKE.items()
        ),
        (live(lambda live: live.set("clip", when=3)), "when Steps"),
        (live(lambda live: live.add(3)), "gs.Intervention 3"),
    ],
    ValueError: [
        (item(gs.Zero(), names=("a", "b")), "1 2"),
        *((item(gs.Zero(), names=(name,)), "names /") for name in ("", "a/b", "/")),
        (item(gs.ClipGlobalNorm(), M()), "ClipGlobalNorm Outputs"),
        (item(gs.ClipGlobalNorm(), N("Relu")), "Nodes Parameters(stage='step')"),
        (item(gs.ClipGlobalNorm(), P(stage="backward")), "'backward' step"),
        (item(CLIPS, P(stage="accumulated")), "ClipGlobalNorm"),
        (item(gs.Clip(), M(stage="step")), "Outputs.stage 'step' backward"),
        (item(gs.AGC(), N("Relu")), "AGC Nodes value"),
        (item(gs.Chain(gs.Clip(), RELU_VALUE), N("Relu")), "ScaleBySign Nodes value"),
        (item(RELU_VALUE, M("act") | N("Relu")), "ScaleBySign value"),
        (item(gs.Clip(), gs.EveryModule(kind="forward", stage="backward")), "'forward' 'backward'"),
        (item(gs.SkipUpdate(), gs.Updates()), "SkipUpdate Updates"),
        (item(gs.SkipUpdate(), P(stage="backward_end")), "SkipUpdate optimizer"),
        (item(gs.SkipUpdate(), P(stage="backward")), "SkipUpdate 'backward' step"),
        (item(gs.ErrorFeedback(gs.SkipUpdate())), "inside"),
        (lambda: gs.SkipUpdate(0.0), "max_norm"),
        (lambda: gs.hook(torch.ones(2), gs.ClipGlobalNorm()), "ClipGlobalNorm"),
        (lambda: gs.hook((_leaf() * 2).grad_fn, gs.AGC()), "AGC node"),
        (lambda: gs.hook(_leaf(), gs.Cautious()), "optimizer"),
        (lambda: P(stage="reduced"), "Parameters.stage 'backward_end'"),
        (attach(gs.SavedTensors("block"), model=with_block), "'re:block'"),
        *(
            (attach(at, model=scripted), f"'{name}' ScriptModule Parameters")
            for at, name in (
                *((M(), "scripted"), (gs.EveryModule(), "scripted")),
                (gs.EveryModule("plain", kind="full_backward_pre"), "scripted"),
                (gs.Inputs("scripted.0"), "scripted.0"),
                *((kind("scripted"), "scripted") for kind in (gs.Activations, gs.ModuleGradients)),
            )
        ),
        *(
            (attach(gs.ModuleGradients("last", kind=kind), model=deprecated), "'last' deprecated")  # pyright: ignore[reportArgumentType]
            for kind in ("full_backward_pre", "full_backward")
        ),
        (attach(gs.SavedTensors("block"), gs.GrokfastEMA()), "'block' GrokfastEMA"),
        (attach(P(), gs.NormRescale(per="row col -> row")), "'first.bias' ndim="),
        *(
            (attach(at, gs.Clip(0.1), scaler=SCALER), "Clip scale stage='step'")
            for at in (P(), P(stage="accumulated"), M(), N("*"))
        ),
        *((scaled(when), "Threshold(above=1.0 scale") for when in OF_SIZE),
        (attach(P(stage="step"), optimizer=None), "'step' optimizer attach start bind"),
        (route([]), "Route live.set_example_labels(labels)"),
        (route([torch.zeros(3, dtype=torch.long)]), "3 labels"),
        (route([torch.zeros(1, 3, dtype=torch.long)]), "labels [1, 3]"),
        (route([torch.zeros(2, 3, dtype=torch.long)], (2, 3, 3), axis=1), "Route.axis [2, 3] 1"),
        (routed(3), "axis 1 [3]"),
        (routed(3, 4, axis=2), "axis 2 [3, 4] 'a.weight'"),
        (routed(3, 1), "Route.groups 2 axis 1 [3, 1]"),
        (lbfgs(gs.Scale(2.0), gs.Updates()), "Updates LBFGS"),
        (lbfgs(gs.SkipUpdate()), "LBFGS gradients"),
        *(
            (in_two(at), f"{type(at).__name__} two optimizers")
            for at in (gs.Updates(), MatchedUpdates(), gs.Weights())
        ),
        (
            attach(P("0.weight"), gs.Scale(2.0), model=sparse, when=gs.Threshold(0.1)),
            "Threshold '0.weight' sparse",
        ),
        (start(small(), effects_every=-1), "effects_every 0 -1"),
        (start(small(), effects_every="x"), "effects_every 'x'"),
        (start(small(), conflict_every=0), "conflict_every 1 0"),
        *(
            (loaded(**changes), "state")
            for changes in (
                {"transforms": ["Scale(factor=3.0)"]},
                {"transforms": []},
                {"transforms": KeyError, "step": KeyError},
                {"step": "one"},
                {"states": None},
                {"states": KeyError},
            )
        ),
        (bound(lambda live, part: live.bind(part)), "last.weight"),
        (bound(lambda live, part: live.before_step(part)), "optimizer bind"),
        (two("first", "*"), "first.weight"),
        (two("first", "last", clock=True), "clock"),
        (live(lambda live: live.set("clip")), "'clip'"),
        (
            live(
                lambda live: live.set("scheduled", of=gs.ClipGlobalNorm(1.0)),
                gs.Scheduled(gs.Scale(1.0)),
            ),
            "'scheduled' 'backward' 'step'",
        ),
    ],
    FieldError: [
        (item(gs.Cautious()), "Parameters Updates"),
        (lambda: P() & M(), "Combined.of Parameters Outputs"),
        (lambda: P() & N("Relu"), "Parameters Nodes"),
        (lambda: N("Relu") & N("Relu", side="leave"), "Nodes"),
        (lambda: P(stage="accumulated") & P(stage="step"), "Parameters(stage='accumulated')"),
        (lambda: P("first.*", stage="backward") | P(), "Parameters()"),
        (lambda: P(stage="backward") | Thin(), "Thin stage"),
        (item(gs.Zero(), P(stage="accumulated") | P(stage="step")), "accumulated step"),
        (lambda: P().expect(2) | M(), "expect"),
        (lambda: ~P().expect(2), "expect"),
        (lambda: P().first(0), "Combined.limit 0"),
        (lambda: P().expect(0), "Combined.count 0"),
        (lambda: P().where(3), "Combined.test"),
        (lambda: gs.Combined((P(),), stage="step"), "Combined.stage"),
        (lambda: gs.Combined(()), "Combined.of"),
        (lambda: gs.Combined((P(), 3)), "Combined.of.1 Selector 3"),
        (lambda: gs.Combined((P(),), by="most"), "Combined.by 'any' 'all'"),
        (lambda: P(depth=-1), "Parameters.depth"),
        (lambda: P(ndim=(1, 2, 3)), "Parameters.ndim"),
        (lambda: P(types=""), "Parameters.types"),
        (lambda: P(types="re:("), "Parameters.types"),
        (lambda: gs.SavedTensors("block", call=0), "SavedTensors.call 'block'"),
        (live(lambda live: live.set("clip", vale=1.0)), "clip.vale 'value'"),
        (live(lambda live: live.set("clip", value=-1.0)), "Clip.value 0"),
    ],
    LookupError: [
        *((attach(P(name)), f"'{name}' {near} {ALL}") for name, near in NEAREST.items()),
        (attach(P("first.*"), model=frozen), "'first.*' frozen first.weight"),
        (attach(P(types=nn.Conv2d, depth=1)), "'*' types=Conv2d depth=(1"),
        (attach(M(types="Conv2d")), "Outputs.types 'Conv2d' Linear ReLU"),
        (attach(P("first.*") & P("last.*")), f"Combined.by {ALL}"),
        (attach(~P()), f"Combined.by {ALL}"),
        (attach(P() | ~P()), f"Combined.by {ALL}"),
        *(
            (attach(at), f"'nope' {ALL}")
            for at in (
                P("nope") | P("neither"),
                P("nope") | P(),
                (P() | P("nope")).first(2),
                P("first.*") | (P() & (P("last.*") | P("nope"))),
                P("first.*") | (P("last.*") | (P() | P("nope"))),
            )
        ),
        (attach(P().expect(3)), f"zero 3 4 {ALL}"),
        (attach(P("first.*").first(1).expect(2)), "2 1 first.weight"),
        (attach(M().expect(2)), "2 3 first#0 act#0 last#0"),
        (attach((P("last.*") | M("act")).expect(2)), "2 3 last.weight act#0"),
        (attach(N("Addmm").expect(1)), "1 2 first#0/AddmmBackward[0]"),
        (attach(M().first(1).expect(2)), "2 1 first#0"),
        (attach(M(types="Linear").expect(2), model=half_called), "2 1 used#0"),
        *((attach(kind("*", call=1)), "first#0 act#0 last#0") for kind in KINDS),
        *((attach(kind("last").where(lambda _: False)), "last#0") for kind in KINDS),
        (attach(M(item="2")), "item='2' first#0 act#0 last#0"),
        (attach(N("Rleu")), "'Rleu' 'Relu' activation matmul"),
        (attach(N("Tanh", module="act")), "activation rectifier Relu"),
        (attach(N("Relu", module="first")), "'first' 'Relu'"),
        (attach(N("Relu", call=3)), "call=3"),
        (attach(N("Relu", occurrence=3)), "occurrence=3"),
        (attach(N("Addmm", side="leave", edge=9)), "0 1 2"),
        (attach(gs.Uses("act", use=3)), "Uses.use 'act' number 3 act#0"),
        (attach(gs.Uses("root")), "root#0"),
        (attach(N("Rleu"), model=beside_a_teacher), "'Rleu'"),
        (attach(M("blocks"), model=Blocks), "blocks 'blocks'"),
        *(
            (attach(P("first.*", stage=stage), model=frozen), "frozen first.weight")
            for stage in ("accumulated", "backward_end")
        ),
        (attach(M("first"), model=exported), "Nodes Parameters first GraphModule"),
        (attach(gs.Inputs(types="Linear"), model=exported), "GraphModule"),
        *(
            (attach(at, model=exported), f"{type(at).__name__} exported")
            for at in (
                gs.Captured("act"),
                N("*", module="act"),
                gs.SavedTensors("act"),
                gs.Uses("act"),
            )
        ),
        (live(lambda live: live.remove("clp")), "'clp' 'clip'"),
        (live(lambda live: live.set("clp", value=1.0)), "'clp' 'clip'"),
        (live(lambda live: live.remove("clip"), CHAIN), "'clip' clip"),
        (
            live(lambda live: live.set("scale -> clip", factor=1.0), CHAIN),
            "'scale -> clip' scale, clip",
        ),
        (
            live(lambda live: live.add(gs.Intervention(gs.Zero(), P("frist.*")))),
            "Parameters.pattern 'frist.*' 'first.*'",
        ),
        (
            live(
                lambda live: live.add(
                    gs.Intervention(gs.Zero(), when=gs.Shape(1, source="input:x"))
                )
            ),
            "'x' first act last root",
        ),
        (
            live(lambda live: live.set("clip", when=gs.Threshold(1.0, source="output:x"))),
            "'x' first act last root",
        ),
        (live(lambda live: live.set("double", value=1.0), double), "'double'"),
    ],
    RuntimeError: [
        (attached_twice, "attached already"),
        (attach(gs.Inputs("1"), model=written(InPlace())), "'1#0.input' Outputs"),
        (
            attach(gs.Inputs("2", path="total"), model=written(nn.Flatten(0), InPlace())),
            "'2#0.input'",
        ),
        *(
            (attach(kind("1"), model=written(layer, InPlace())), f"'{site}'")
            for kind, site in ((gs.Inputs, "1#0.input"), (M, "1#0"))
            for layer in (nn.Identity(),)
        ),
        (attach(gs.Inputs("append"), model=append), "append#0.input container"),
        (
            attach(gs.SavedTensors(node="Tanh"), model=checkpointed),
            "'inner#0/TanhBackward[0].result'",
        ),
        *(
            (
                attach(gs.ModuleGradients("m", kind=kind), model=model),
                f"'m#0{'.input' * (kind == 'full_backward')}' {where} Outputs",
            )
            for model, kind, where in (
                (returning(lambda x: {"a": x}), "full_backward_pre", "dict"),
                (returning(lambda x: Answer(x, {})), "full_backward_pre", "Answer"),
                (returning(lambda x: [x]), "full_backward_pre", "list"),
                (returning(lambda x: ({"a": x},)), "full_backward_pre", "tuple"),
                (by_keyword, "full_backward", "argument"),
            )
        ),
    ],
}

ROWS = [(call, error, names) for error, rows in ERRORS.items() for call, names in rows]


@pytest.mark.parametrize(("call", "error", "names"), ROWS, ids=range(len(ROWS)))
def test_an_error_names_its_cause(call: Call, error: type[Exception], names: str) -> None:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert [name for name in names.split() if name not in text] == []
    assert text.lower().count("did you mean") <= 1


EVERY = gs.EveryModule
KIND = ("full_backward_pre", "full_backward")


def named_twice() -> Made:
    inside = nn.Sequential(nn.Linear(6, 2))
    return Made(lambda self, x: self.inner(x), inner=inside, linear=inside[0])


def traced(model: nn.Module) -> None:
    x = torch.ones(2, 6)
    torch.jit.trace(model, (x,), check_trace=False)(x).sum().backward()  # pyright: ignore[reportCallIssue] - a module


def in_reentrant() -> Made:
    return Made(lambda self, x: recomputed(self.inner, x, True).sum(), inner=small())


def inside(place: Place) -> bool:
    return place.name.startswith("inner")


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), nn.Linear(3, 3))


def waiting() -> None:
    gs.Surgery(gs.Intervention(gs.Zero(), P(stage="step"))).start(small()).close()


def of_integers(model: nn.Module) -> None:
    model(torch.ones(1, dtype=torch.long)).sum().backward()


def thawed() -> nn.Module:
    model = small()
    model.last.requires_grad_(False)
    return model


def between(change: Callable[[Any], object]) -> Callable[[nn.Module], None]:
    """Make a step before and one after a change of the model, in the open block."""

    def run(model: nn.Module) -> None:
        backward(model)
        change(model)
        backward(model)

    return run


def grow(model: Any) -> None:
    model.last = nn.Linear(5, 5)
    model.append(nn.Linear(5, 3))


def thaw(model: nn.Module) -> None:
    model.last.requires_grad_(True)


def put_back(model: Any) -> None:
    first, model.first = model.first, nn.Linear(6, 5)
    model.first = first


GREW = "modules replaced block last, 3. Attach"
OWN = gs.Identity()
CAME = {
    GREW: (
        *(kind() for kind in (M, gs.Inputs, gs.ModuleGradients, gs.Activations, gs.SavedTensors)),
        *(gs.SavedTensors(node="Relu"), EVERY("re:last|3"), N("Addmm"), M() & M(types="Linear")),
    ),
    f"{GREW} parameters last.weight, last.bias, 3.wei": (gs.Uses("*"),),
    "parameters unfrozen block last.weight, last.bias, 3.wei": (P(), P(stage="backward_end")),
    "": (
        *(M("first"), M(types="ReLU"), M().first(2), P("first.*"), gs.SavedTensors("block")),
        *(EVERY(), EVERY("Linear") | EVERY("first")),
    ),
}
"""The names in the warning that modules and parameters came into the open block."""

WARNED: Sequence[tuple[Call, str]] = [
    *((scaled(when), "") for when in NOT_OF_SIZE),
    *((scaled(when, "step"), "") for when in OF_SIZE),
    *((attach(at, OWN, run=between(grow)), names) for names, kinds in CAME.items() for at in kinds),
    *(
        (attach(at, OWN, thawed, run=between(thaw)), "parameters no last.weight, last.bias.")
        for at in (P(), P(stage="backward_end"))
    ),
    *((attach(at, OWN, thawed, run=between(thaw)), "") for at in (P("first.*"), gs.Uses("*"), M())),
    *(
        (attach(M("*"), OWN, run=between(change)), "")
        for change in (
            put_back,
            lambda model: copy.deepcopy(model).append(nn.Linear(3, 3)),
            lambda model: model.__delitem__(2),
            lambda model: model.__setitem__(2, torch.compile(model.last, backend="eager")),
        )
    ),
    (attach(N("Nope") | N("Relu")), "zero Nodes(pattern='Nope')"),
    (attach(N("Relu") & ~N("Nope")), "zero Nodes(pattern='Nope')"),
    (attach(P() & ~P("nope")), "zero Parameters(pattern='nope')"),
    (attach(M() & ~(M("first") | M("head.*"))), "zero Outputs(pattern='head.*')"),
    (attach(P("first.*") & ~P("last.*")), ""),
    (attach(N("Relu") | N("Sigmoid") | N("Addmm")), "zero Nodes(pattern='Sigmoid')"),
    (attach(N("Relu") | N("Addmm")), ""),
    (attach(N("Relu") & ~N("Addmm")), ""),
    (attach((N("Addmm") | N("Relu")).first(1)), ""),
    (attach(P() | M("last", call=1)), "zero last#1"),
    (
        attach(EVERY("m", kind="full_backward"), model=by_keyword, run=forward),
        "m#0.input.input full",
    ),
    (
        attach(EVERY("m", kind="full_backward_pre"), model=returning(lambda x: [x]), run=forward),
        "m#0.0 full",
    ),
    (attach(EVERY("Nope")), "zero reached"),
    (attach(M("linear") | M("inner"), model=named_twice), "linear#0 inner.0"),
    *(
        (attach(at, gs.Scale(2.0), model=scripted), "")
        for at in (
            *(kind("plain") for kind in (M, gs.Inputs, gs.Activations, gs.ModuleGradients)),
            EVERY("plain", kind="forward"),
        )
    ),
    *((attach(at, run=traced), "zero torch.jit.trace") for at in (M("first"), N("Relu"))),
    (attach(M("inner.*").expect(3), model=in_reentrant, run=forward), "zero 3"),
    (attach(N("Tahn"), model=in_reentrant, run=backward), "zero none reached"),
    *(
        (attach(kind().where(inside), OWN, in_reentrant, run=backward), "")
        for kind in (M, gs.Inputs, gs.Activations, gs.SavedTensors)
    ),
    (attach(P("*.weight"), OWN, normed), "'0.weight' parametrized 0.parametrizations."),
    *((attach(P(name), OWN, normed), "") for name in ("*", "1.weight", "*.original0")),
    (attach(gs.Captured("re:first.weight|act"), run=backward), "first.weight autograd.grad act#0"),
    (waiting, "live.bind(optimizer)"),
    (
        attach(gs.Inputs("0"), model=lambda: nn.Sequential(nn.Embedding(3, 2)), run=of_integers),
        "0#0.input floating",
    ),
    *(
        (attach(at, model=frozen, run=of_no_gradient), "zero first#0 needs no gradient")
        for at in (
            *(M("first"), gs.Inputs("first"), gs.Inputs("first", path="total")),
            *(gs.ModuleGradients("first", kind=kind) for kind in KIND),  # pyright: ignore[reportArgumentType]
            *(EVERY("first", kind=kind) for kind in KIND),  # pyright: ignore[reportArgumentType]
        )
    ),
    (attach(gs.SavedTensors("first"), model=frozen, run=of_no_gradient), "zero first#0 saves"),
]


@pytest.mark.parametrize(("call", "names"), WARNED, ids=range(len(WARNED)))
def test_a_warning_names_its_cause(call: Call, names: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    text = " ".join(
        str(one.message) for one in caught if issubclass(one.category, gs.SurgeryWarning)
    )
    assert [name for name in names.split() if name not in text] == []
    assert bool(text) == bool(names)


MODULES: dict[str, object] = {"call": -1, "depth": (2, 1), "index": "first", "types": "re:("}
PARAMETERS: dict[str, object] = {"ndim": -1, "size": 1.5, "depth": True, "types": ""}
INVALID: dict[str, dict[str, object]] = {
    "Activations": MODULES | {"side": "both", "backward": "twice"},
    "Buckets": PARAMETERS | {"reduce": "sum"},
    "Captured": MODULES | {"ndim": -1},
    "EveryModule": {"kind": "backward", "types": ""},
    "Inputs": MODULES | {"path": "both"},
    "ModuleGradients": MODULES | {"kind": "backward"},
    "Nodes": {"module": "re:[", "side": "both", "edge": 1, "occurrence": -1},
    "Outputs": MODULES,
    "Parameters": PARAMETERS,
    "SavedTensors": MODULES | {"node": "re:(", "of": "weights"},
    "Updates": PARAMETERS,
    "Uses": {"use": -1},
    "Weights": PARAMETERS,
}


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_fields_are_refused_by_name(kind: str) -> None:
    make = getattr(gs, kind)
    common = [("pattern", ""), ("pattern", "re:("), ("stage", "never")]
    for field, wrong in [*common, *INVALID[kind].items()]:
        with pytest.raises(FieldError, match=rf"^{kind}\.{field}: "):
            make(**{"pattern": "*", field: wrong})
