"""Combinations of kinds of site, contexts, transforms, triggers and models."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import gradsurg as gs
from tests.oracle.core_models import MODELS
from tests.oracle.core_outcome import Cell, Observed
from tests.oracle.core_sites import KINDS, SELECTIONS, At
from tests.oracle.core_training import CONTEXTS, train

Make = Callable[[], Any]  # Any: transforms and triggers, whose base classes may move

TRANSFORMS: dict[str, Make] = {
    "Scale": lambda: gs.Scale(0.5),
    "Clip": lambda: gs.Clip(0.01),
    "ClipNorm": lambda: gs.ClipNorm(0.1, eps=1e-6),
    "ScaleBySign": lambda: gs.ScaleBySign(1.0, 0.1),
    "NormRescale": lambda: gs.NormRescale(0.1, per="unit"),
    "Mask": lambda: gs.Mask(0.5, by="random", rescale=True),
    "AddNoise": lambda: gs.AddNoise(sigma=0.01),
    "Momentum": lambda: gs.Momentum(0.9),
    "Delay": lambda: gs.Delay(1),
    "AGC": lambda: gs.AGC(0.1),
    "Chain": lambda: gs.Chain(gs.Momentum(0.5), gs.ClipNorm(0.2), gs.AddNoise(sigma=0.01)),
    "ClipGlobalNorm": lambda: gs.ClipGlobalNorm(0.1),
    "AdaptiveClip": lambda: gs.AdaptiveClip("ratio", warmup=1),
    "group chain": lambda: gs.Chain(gs.Scale(2.0), gs.RescaleGlobalNorm(0.3), gs.Momentum(0.5)),
    "SkipUpdate": lambda: gs.SkipUpdate(max_norm=0.5),
    "PerSample": lambda: gs.PerSample(gs.ClipGlobalNorm(0.1)),
    "function": lambda: lambda grad: grad * 0.5,
}

TRIGGERS: dict[str, Make] = {
    "Steps": lambda: gs.Steps(1, 3),
    "Every": lambda: gs.Every(2, offset=1),
    "Probability": lambda: gs.Probability(0.5),
    "Probability per site": lambda: gs.Probability(0.5, per="site", seed=3),
    "Threshold": lambda: gs.Threshold(above=0.02),
    "Threshold with release": lambda: gs.Threshold(above=0.3, measure="norm", release=0.1),
    "Threshold of the batch": lambda: gs.Threshold(above=0.8, source="batch"),
    "AllSameSign": lambda: gs.AllSameSign(),
    "Flag": lambda: gs.Flag("flag"),
    "Shape": lambda: gs.Shape(above=6),
    "Depth": lambda: gs.Depth(2),
    "Index": lambda: gs.Index(1),
    "Epochs": lambda: gs.Epochs(start=1, length=2),
    "Phase": lambda: gs.Phase("train", warm_up=1, fine_tune=3),
    "never": lambda: gs.Steps(100),
    "and": lambda: gs.Steps(1) & gs.Threshold(above=0.01),
    "or not": lambda: gs.Every(3) | ~gs.Probability(0.7),
}

PAIRS: dict[str, tuple[Make, Make]] = {
    "clip, scale": (TRANSFORMS["Clip"], lambda: gs.Scale(20.0)),
    "scale, clip": (lambda: gs.Scale(20.0), TRANSFORMS["Clip"]),
    "noise, noise": (TRANSFORMS["AddNoise"], TRANSFORMS["AddNoise"]),
    "momentum, sign": (TRANSFORMS["Momentum"], lambda: gs.Sign()),
}

Attachments = list[tuple[Make, At, Make | None]]


def run(attachments: Attachments, context: str, model: str, observed: Observed) -> None:
    """Train under interventions, each a transform, its sites and its trigger."""
    loop = CONTEXTS[context]
    items = [
        gs.Intervention(make(), at=at(), when=gs.Always() if when is None else when())
        for make, at, when in attachments
    ]
    surgery = gs.Surgery(*items, seed=5)
    train(observed, surgery, loop, model)


def cell(
    kind: str, column: str, detail: str, attachments: Attachments, context: str, model: str
) -> Cell:
    return Cell(kind, column, detail, partial(run, attachments, context, model))


def cells() -> Iterator[Cell]:
    """Yield every combination of one process and one loss."""
    yield from _transforms()
    yield from _contexts()
    yield from _triggers()
    yield from _models()
    yield from _selections()
    yield from _pairs()
    yield from _catalogue()


def _transforms() -> Iterator[Cell]:
    """Kinds x transforms, with one pass a step, with several, and with a loss scale."""
    for (kind, at), (name, make) in product(KINDS.items(), TRANSFORMS.items()):
        for context in ("plain", "accumulation", "loss scale"):
            yield cell(kind, context, name, [(make, at, None)], context, "mlp")


def _contexts() -> Iterator[Cell]:
    few, one = ("Momentum", "AddNoise", "Scale"), ("Scale",)
    for (kind, at), context in product(KINDS.items(), CONTEXTS):
        if context in ("plain", "accumulation", "loss scale"):  # in _transforms
            continue
        for name in one if "compile" in context else few:
            attachments: Attachments = [(TRANSFORMS[name], at, None)]
            yield cell(kind, context, name, attachments, context, "mlp")


def _triggers() -> Iterator[Cell]:
    for (kind, at), (name, when) in product(KINDS.items(), TRIGGERS.items()):
        attachments: Attachments = [(TRANSFORMS["Scale"], at, when)]
        yield cell(kind, "triggers", name, attachments, "plain", "mlp")
    for kind, context in product(("Parameters backward", "Outputs"), ("accumulation", "shadow")):
        for name, when in TRIGGERS.items():
            attachments = [(TRANSFORMS["Momentum"], KINDS[kind], when)]
            yield cell(kind, context, f"Momentum, {name}", attachments, context, "mlp")


def _models() -> Iterator[Cell]:
    names = [name for name in MODELS if name not in ("mlp", "heads", "checkpoint", "reentrant")]
    for (kind, at), model, name in product(KINDS.items(), names, ("Scale", "Mask")):
        attachments: Attachments = [(TRANSFORMS[name], at, None)]
        detail = f"{model}, {name}"
        yield cell(kind, "models", detail, attachments, "plain", model)


def _selections() -> Iterator[Cell]:
    for (name, at), model in product(SELECTIONS.items(), ("mlp", "twice", "nested")):
        attachments: Attachments = [(TRANSFORMS["AddNoise"], at, None)]
        detail = f"{name}, {model}"
        yield cell("selections", "plain", detail, attachments, "plain", model)


def _pairs() -> Iterator[Cell]:
    """Two interventions at each site: their order counts."""
    for (kind, at), (name, (first, second)) in product(KINDS.items(), PAIRS.items()):
        attachments: Attachments = [(first, at, None), (second, at, TRIGGERS["Steps"])]
        yield cell(kind, "two interventions", name, attachments, "plain", "twice")
    early, late = list(KINDS)[::2], list(KINDS)[1::2]
    for first, second in zip(early, late, strict=True):
        attachments = [(TRANSFORMS["Clip"], KINDS[first], None)]
        attachments += [(TRANSFORMS["Momentum"], KINDS[second], None)]
        yield cell(first, "two interventions", f"and {second}", attachments, "plain", "nested")


def _catalogue() -> Iterator[Cell]:
    """Every transform with its defaults, where it can act."""
    kinds = ("Parameters step", "Parameters accumulated", "Outputs", "Nodes leave", "Updates")
    for make, kind in product(plugins("transforms"), kinds):
        attachments: Attachments = [(make, KINDS[kind], None)]
        yield cell(kind, "plain", f"default {make.__name__}", attachments, "plain", "mlp")


def plugins(folder: str) -> list[type]:
    """The classes of a folder of plug-ins, by name."""
    found = (value for value in (getattr(gs, name) for name in dir(gs)) if isinstance(value, type))
    return [each for each in found if str(each.__module__).startswith(f"gradsurg.{folder}.")]
