"""Write docs/gallery.md and its pictures: python docs/draw_gallery.py [NAME ..]

With names, only their pictures; `scripts/stub.py` writes the text alone. Each picture is drawn by
the transform or aggregator itself, with the fields of ILLUSTRATED if it has some there.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator, AggregatorContext
from gradsurg.experiment import catalogue
from gradsurg.experiment.catalogue import Entry
from gradsurg.experiment.making import make
from gradsurg.transforms.base import Transform, TransformContext
from gradsurg.triggers.base import Clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from PIL import Image

PAGE, PICTURES = Path(__file__).with_name("gallery.md"), Path(__file__).with_name("gallery")
DRAWN = {"transform": Transform, "aggregator": Aggregator}
RECIPES = "experiment", "surgery"

BEFORE, AFTER, DARK, RED = "#a3a3a3", "#1d4ed8", "#404040", "#dc2626"
STYLE: dict[Any, Any] = {"font.size": 7, "axes.labelpad": 1, "axes.linewidth": 0.6}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e5e5e5"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}

ILLUSTRATED: dict[str, dict[str, Any]] = yaml.safe_load("""
adagc: {warmup: 5, max_norm: 100.0, decay: 0.9}
adaptive_clip: {warmup: 20, max_norm: 100.0}
add_decayed: {strength: 0.4}
add_noise: {eta: 1.0}
agc: {clipping: 0.8, per: tensor}
autoclip: {z: 0.5, warmup: 5}
centered_clip: {tau: 1.0}
chain: {links: [{_target_: gradsurg.Clip, value: 1.0}, {_target_: gradsurg.Scale, factor: 0.5}]}
clamp: {low: -0.5, high: 1.5}
clip: {value: 1.0}
clip_rms: {max_norm: 0.7}
delay: {steps: 12}
dgc: {amount: 0.1}
dp_sgd: {noise: 0.5}
fast_sigmoid_surrogate: {slope: 3.0}
ghm: {bins: 5}
grokfast_ema: {decay: 0.9}
grokfast_ma: {window: 20, strength: 2.0}
krum: {num_byzantine: 1}
lars:
  links: [{_target_: gradsurg.AddDecayed, strength: 0.4},
          {_target_: gradsurg.TrustRatio, coefficient: 0.5}]
lrp: {rule: zplus}
mask: {amount: 0.5}
n_of_m: {n: 1, m: 2}
noise: {sigma: 1.0}
norm_matched: {of: {_target_: gradsurg.Clip, value: 1.0}}
qsgd: {per: unit}
quantize: {levels: 3}
route: {groups: [[0], [1]]}
scale: {factor: 0.5}
scheduled: {steps: 100}
skip_update: {max_norm: 2.0}
soft_threshold: {amount: 0.8}
spike_clip: {threshold: 4.0, decay: 0.9}
trimmed_mean: {beta: 0.2}
trust_ratio: {coefficient: 0.5}
zclip: {warmup: 20, max_norm: 100.0}
""")
"""Fields of which the defaults would have no visible effect."""

UNSEEN = ("identity", "per_sample", "per_sample_and_mask", "sanitize")
"""The transforms whose pictures can show no effect."""

NO_EFFECT = (
    "the picture shows no effect: give fields in ILLUSTRATED in docs/draw_gallery.py, or the name "
    "in UNSEEN there if no gradient of a picture can change"
)

BLOCK, VISIBLE, FEW = 4, 48, 25
"""How pictures are compared: by means over blocks, BLOCK pixels wide and high. The difference of
two blocks that a reader sees, in levels of gray. The number of such blocks to ignore."""


def main(wanted: Sequence[str]) -> None:
    """Write the page, and the pictures of these names, or all."""
    PAGE.write_text(page(), encoding="utf-8")
    entries = [entry for group in DRAWN for entry in catalogue.list(group)]
    for old in {*PICTURES.glob("*.png")} - {picture(entry) for entry in entries}:
        old.unlink()
    for entry in entries:
        if not wanted or entry.name in wanted:
            store(entry)


def page() -> str:
    """Return the text of the page, with its tables written anew."""
    recipes = [[one for one in catalogue.list(group) if one.paper] for group in RECIPES]
    groups = [*map(catalogue.list, DRAWN), *recipes]
    tables = ("".join(f"{row(entry)}\n" for entry in group) for group in groups)
    text = PAGE.read_text(encoding="utf-8")
    return re.sub(r"(?<=\|---\|---\|\n)(\|.*\n)*", lambda _: next(tables), text)


def row(entry: Entry) -> str:
    """Return the line of one entry."""
    paper = f"[{entry.paper}]({entry.url})" if entry.url else entry.paper
    preset = f"Preset of `{entry.preset_of}`." if entry.preset_of else ""
    if entry.group not in DRAWN:
        cells = [f"{entry.summary}.", preset, f"`{entry.command}`", paper]
        return f"| `{entry.name}` | {joined(cells)} |"
    cells = [f"**`{entry.name}`** {entry.summary}.", preset]
    if entry.properties:
        cells.append(f"Properties: {', '.join(entry.properties).replace('_', ' ')}.")
    every = max((one.stages for one in catalogue.list(entry.group)), key=len)
    lacking = [stage for stage in every if stage not in entry.stages]
    if 0 < len(lacking) < len(every):
        few = len(lacking) < len(entry.stages)
        cells.append(f"Stages: {'all but ' * few}{', '.join(lacking if few else entry.stages)}.")
    cells.append(paper)
    if fields := ILLUSTRATED.get(entry.name):
        shown = yaml.safe_dump(fields, default_flow_style=True, width=1000).strip()
        cells.append(f"Drawn with {shown[1:-1]}.")
    image = f'<img src="gallery/{picture(entry).name}" width="240" alt="{entry.name}">'
    return f"| {image} | {joined(cells)} |"


def joined(texts: Sequence[str]) -> str:
    """Return the lines of one cell of a table."""
    return "<br>".join(filter(None, texts)).replace("|", "\\|")


def picture(entry: Entry) -> Path:
    """Return the path of a picture."""
    return PICTURES / f"{entry.group}_{entry.name}.png"


def store(entry: Entry) -> Path:
    """Draw the picture of an entry into its file, and return its path."""
    drawn(entry).save(picture(entry), optimize=True)
    return picture(entry)


def drawn(entry: Entry, *, acts: bool = True) -> "Image.Image":
    """Return the picture of an entry, with few colors. Without `acts` gradients stay unchanged."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from PIL import Image

    mpl.use("agg")
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(2.4, 1.6), dpi=200, layout="constrained")
        fields = entry.fields | ILLUSTRATED.get(entry.name, {})
        thing = make(fields, DRAWN[entry.group])
        # `draw_plane` draws the needs too, so the two pictures need the same.
        shown = thing if acts else replaced(thing.needs & {"value", "gradient"})
        drawer(entry, thing)(axes, shown)
        figure.savefig(buffer := BytesIO(), facecolor="white")
        plt.close(figure)
    return Image.open(buffer).convert("RGB").quantize(48)


def replaced(needs: frozenset[str]) -> Transform:
    """Return a transform that returns the gradient, with these needs."""
    return type("Unchanged", (gs.Identity,), {"needs": needs})()


def is_up_to_date(entry: Entry) -> bool:
    """Return whether the picture in the file looks as it would be drawn now."""
    from PIL import Image

    return picture(entry).exists() and not differ(Image.open(picture(entry)), drawn(entry))


def shows_effect(entry: Entry) -> bool:
    """Return whether the picture of a transform differs from one of unchanged gradients."""
    is_known = entry.group == "aggregator" or entry.name in UNSEEN
    return is_known or differ(drawn(entry), drawn(entry, acts=False))


def differ(first: "Image.Image", second: "Image.Image") -> bool:
    """Return whether a reader sees that two pictures are different."""
    from PIL import ImageChops

    if first.size != second.size:
        return True
    means = [each.convert("L").reduce(BLOCK) for each in (first, second)]
    return sum(ImageChops.difference(*means).histogram()[VISIBLE:]) > FEW


def drawer(entry: Entry, thing: Any) -> "Draw":  # Any: a transform or an aggregator
    """Return the function that draws an entry."""
    if entry.name in OF_NAMES:
        return OF_NAMES[entry.name]
    if entry.group == "aggregator":
        return draw_tasks
    for need in OF_NEEDS:
        if need in entry.needs:
            return OF_NEEDS[need]
    if thing.init(torch.zeros(8, 8)):
        return draw_steps
    if entry.name.endswith(("_surrogate", "surrogate_gradient")):
        return draw_factor
    if "deterministic" not in entry.properties:
        return draw_histogram
    if "elementwise" in entry.properties and "value" not in entry.needs:
        return draw_graph
    return draw_plane


def lines(axes: "Axes", x: Tensor, before: Tensor, after: Tensor, *labels: str) -> None:
    """Draw two curves over x, and label the axes."""
    axes.plot(x, before, color=BEFORE, lw=1.2)
    axes.plot(x, after, color=AFTER, lw=1.6)
    axes.set(**dict(zip(("xlabel", "ylabel"), labels, strict=True)))


def bars(axes: "Axes", before: Tensor, after: Tensor, label: str) -> None:
    """Draw the entries of two vectors, the second in front of the first."""
    axes.bar(range(len(before)), before, color=BEFORE)
    axes.bar(range(len(after)), after, color=AFTER, width=0.4)
    axes.set(xlabel=label, xticks=[])


def arrows(axes: "Axes", starts: Tensor, ends: Tensor, color: str, width: float = 0.008) -> None:
    """Draw an arrow from each start to each end, with one scale for both axes."""
    x, y = (ends - starts).T
    units: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1}
    axes.quiver(*starts.expand_as(ends).T, x, y, color=color, width=width, zorder=4, **units)
    axes.set_aspect("equal", adjustable="datalim")


def applied(transform: Transform, grad: Tensor, **context: Any) -> Tensor:  # Any: its fields
    """Return the result of a transform in its first state."""
    return transform.update(grad, transform.init(grad), TransformContext("a", **context))[0]


def over_steps(transform: Transform, grads: Tensor) -> Tensor:
    """Return the results of a sequence of gradients, which are also the updates of plain SGD."""
    state, results = transform.init(grads[0]), []
    for step, grad in enumerate(grads):
        context = TransformContext("a", step=step, gradient=grad)
        result, state = transform.update(grad, state, context)
        results.append(result)
    return torch.stack(results)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def directions(angles: Tensor) -> Tensor:
    """Return vectors of length 1."""
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def draw_graph(axes: "Axes", transform: Transform) -> None:
    """Draw the result of one entry as a function of it."""
    x = torch.linspace(-3, 3, 1201)
    y = applied(transform, x)
    is_jump = y.diff(append=y[-1:]).abs() > 0.2
    lines(axes, x, x, y.where(~is_jump, math.nan), "entry of the gradient", "result")


def draw_factor(axes: "Axes", transform: Transform) -> None:
    """Draw the factor of a gradient over the value, and the step function that it smooths."""
    x = torch.linspace(-2.5, 2.5, 801)
    lines(axes, x, (x > 0).float(), applied(transform, torch.ones(801), value=x), "value", "factor")


def draw_distance(axes: "Axes", transform: Transform) -> None:
    """Draw what is added to a gradient of zero over the value, for a first value of one."""
    values = torch.linspace(-2.0125, 2.9875, 201)[:, None]  # not zero, where the slope is infinite
    zeros, first = torch.zeros_like(values), TransformContext("a", 0, torch.ones_like(values))
    state = transform.update(zeros, transform.init(zeros), first)[1]
    added = transform.update(zeros, state, TransformContext("a", 1, values))[0]
    lines(axes, values, zeros, added, "value, which was 1 at first", "added gradient")


def draw_steps(axes: "Axes", transform: Transform) -> None:
    """Draw one entry over the steps, slow waves with noise."""
    waves = torch.sin(torch.arange(140)[:, None, None] * math.tau / 70 + random(8, 8, seed=1))
    grads = waves + 0.4 * random(140, 8, 8, seed=3)
    results = over_steps(transform, grads)
    lines(axes, torch.arange(140), grads[:, 0, 0], results[:, 0, 0], "step", "one entry")


def draw_norms(axes: "Axes", transform: Transform) -> None:
    """Draw the norm of a gradient with spikes over the steps."""
    steps = torch.arange(120)
    sizes = 1 + 0.5 * torch.exp(-steps / 30) + 0.12 * random(120, seed=1)
    sizes[[45, 70, 95]] *= 3
    grads = sizes[:, None] * torch.tensor([0.6, 0.8])
    lines(axes, steps, grads.norm(dim=1), over_steps(transform, grads).norm(dim=1), "step", "norm")


def draw_skipped(axes: "Axes", transform: Transform) -> None:
    """Draw a weight under SGD, with one large gradient."""
    grads = torch.ones(14, 1, 1)
    grads[6] = 5.0
    layer, weights = torch.nn.Linear(1, 1, bias=False), []
    torch.nn.init.zeros_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    surgery = gs.Surgery(gs.Intervention(transform, at=gs.Parameters(stage="step")))
    with surgery.attach(layer, optimizer):
        for layer.weight.grad in grads:
            optimizer.step()
            weights.append(layer.weight.item())
    before = -grads.cumsum(0).flatten()
    lines(axes, torch.arange(14), before, torch.tensor(weights), "step", "a weight")


def draw_histogram(axes: "Axes", transform: Transform) -> None:
    """Draw the distribution of the entries of a random gradient before and after."""
    grad = random(1250, 16)
    bins = torch.linspace(-4, 4, 81).tolist()
    axes.hist(grad.flatten(), bins, color=BEFORE)
    axes.hist(applied(transform, grad).flatten(), bins, color=AFTER, histtype="step", lw=1.3)
    axes.set_yscale("symlog", linthresh=1000)
    axes.tick_params(left=False, labelleft=False, which="both")
    axes.set(xlabel="entry of the gradient", ylim=0)


def draw_units(axes: "Axes", transform: Transform) -> None:
    """Draw the gradient of the units of a ReLU, half of which are inactive."""
    entering = torch.tensor([1.0, -1.5, 0.5, -0.8, 1.2, -0.6, 0.9, -1.1])
    grad = entering * torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    bars(axes, grad, applied(transform, grad, entering=(entering,)), "units; left: inactive")


def draw_routed(axes: "Axes", transform: Transform) -> None:
    """Draw the gradient of 8 units for an example."""
    label = Clock(batch={"labels": torch.tensor([0])})
    result = applied(transform, torch.ones(1, 8), backward=label)[0]
    bars(axes, torch.ones(8), result, "units, for an example of the first group")


def draw_agreement(axes: "Axes", transform: Transform) -> None:
    """Draw the sum of four micro-batches before and after."""
    grads = random(12, seed=2) + 0.6 * random(4, 12, seed=3)
    state, total = transform.init(grads[0]), torch.zeros(12)
    for call, grad in enumerate(grads):
        result, state = transform.update(grad, state, TransformContext("a", call=call))
        total += result
    bars(axes, grads.sum(0), total, "entries of the sum of four micro-batches")


def draw_tokens(axes: "Axes", transform: Transform) -> None:
    """Draw one channel of the gradients of ten tokens before and after."""
    grad = random(10, 1, seed=5)
    bars(axes, grad[:, 0], applied(transform, grad)[:, 0], "tokens, in one channel")


def draw_matrix(axes: "Axes", transform: Transform) -> None:
    """Draw the singular values of a matrix before and after."""
    grad = random(16, 10) @ torch.diag(0.8 ** torch.arange(10.0)) / 4
    result = over_steps(transform, grad.expand(5, 16, 10))[-1]
    before, after = torch.linalg.svdvals(grad), torch.linalg.svdvals(result)
    bars(axes, before, after, "singular values of a matrix")


def draw_relevance(axes: "Axes", transform: Transform) -> None:
    """Draw value times gradient of the inputs of a layer of one unit, with and without a rule."""
    weights = torch.tensor([0.9, -0.7, 0.5, -0.4, 0.3])
    layer = torch.nn.Linear(5, 1, bias=False)
    layer.weight = torch.nn.Parameter(weights[None])
    x = torch.tensor([1.0, 1.0, -0.6, -1.2, 1.4], requires_grad=True)
    with gs.Surgery(gs.Intervention(transform, at=gs.Inputs())).attach(layer):
        (grad,) = torch.autograd.grad(layer(x[None]).sum(), x)
    values = x.detach()
    bars(axes, values * weights, values * grad, "inputs of a layer: value times gradient")


def draw_plane(axes: "Axes", transform: Transform) -> None:
    """Draw a function of two entries; `own` are the weights, or the gradient of an update."""
    own = torch.tensor([1.6, 0.9])

    def result(point: Tensor) -> Tensor:
        return applied(transform, point[None], value=own[None], gradient=own[None])[0]

    draw_map(axes, result, lambda point: point)
    starts = 1.75 * CIRCLE[15::30]
    arrows(axes, starts, images(result, starts), RED, 0.005)
    for need in transform.needs:
        arrows(axes, torch.zeros(2), own[None], "black")
        axes.text(1.7, 0.95, {"value": "w", "gradient": "g"}[need])


def draw_product(axes: "Axes", transform: Transform) -> None:
    """Draw the gradient of a layer's input, for circles and rays of gradients of its output."""
    weights = torch.tensor([[0.9, -0.3], [0.2, 0.8]])

    def result(point: Tensor) -> Tensor:
        error = point[None]
        context = {"backward": Clock(error=error), "entering": (error,)}
        return applied(transform, error @ weights, **context)[0]

    draw_map(axes, result, lambda point: point @ weights)


CIRCLE = directions(torch.linspace(0, math.tau, 361))


def draw_map(
    axes: "Axes", result: Callable[[Tensor], Tensor], before: Callable[[Tensor], Tensor]
) -> None:
    """Draw circles and rays in the plane of gradients with two entries before and after."""
    rays = torch.linspace(0.02, 2, 100)[:, None] * CIRCLE[::30, None]
    for points in (*(radius * CIRCLE for radius in (0.5, 1, 1.5, 2)), *rays):
        axes.plot(*images(before, points).T, color=BEFORE, lw=0.5)
        axes.plot(*images(result, points).T, color=AFTER, lw=0.9, zorder=3)
    axes.set_aspect("equal", adjustable="datalim")


def images(function: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    return torch.stack([function(point) for point in points])


def draw_tasks(axes: "Axes", aggregator: Aggregator) -> None:
    """Draw two gradients in conflict, their aggregate, and the aggregates of other angles."""
    first = torch.tensor([1.5, 0.2])
    seconds = directions(torch.linspace(0, math.tau, 121) + 1e-3)
    results = images(lambda second: merged(aggregator, torch.stack([first, second])), seconds)
    axes.plot(*seconds.T, color=BEFORE, lw=0.5)
    draw_rows(axes, torch.stack([first, seconds[42]]), results[42], results)


def merged(aggregator: Aggregator, rows: Tensor) -> Tensor:
    """Return the aggregate after ten equal steps, with decreasing losses."""
    state, result = aggregator.init(len(rows)), rows
    losses = torch.tensor([1.0, 0.5], dtype=torch.float64)
    for step in range(10):
        group = f"{rows[1, 0]}"  # another draw for each angle
        context = AggregatorContext(step=step, group=group, losses=losses)
        result, state = aggregator.merge(rows, state, context)
        losses = losses - torch.tensor([0.05, 0.005])
    return result


def draw_robust(axes: "Axes", aggregator: Aggregator) -> None:
    """Draw the gradients of seven tasks and the aggregate."""
    result, _ = aggregator.merge(seven(), aggregator.init(7), AggregatorContext())
    draw_rows(axes, seven(), result)


def draw_examples(axes: "Axes", transform: Transform) -> None:
    """Draw the gradients of seven examples and their result; dots: with other random numbers."""
    rows, results = seven(), []
    for seed in range(1 if "deterministic" in transform.properties else 100):
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        surgery = gs.Surgery(gs.Intervention(transform), seed=seed)
        with surgery.attach(model, optimizer, effects_every=0):
            model(rows).mean().backward()  # the gradient of an example is its row
            optimizer.step()
        assert model.weight.grad is not None
        results.append(model.weight.grad[0])
    draw_rows(axes, rows, results[0], torch.stack(results))


def seven() -> Tensor:
    """Return seven gradients, of which the first is far away."""
    rows = torch.tensor([0.6, 0.5]) + 0.3 * random(7, 2, seed=4)
    rows[0] = torch.tensor([-2.4, 1.9])
    return rows


def draw_rows(axes: "Axes", rows: Tensor, result: Tensor, others: Tensor | None = None) -> None:
    """Draw several gradients, their mean, their result, and dots at other results."""
    axes.plot(*rows.T, ".", ms=2, color=DARK)
    axes.plot(*rows.mean(0), "x", ms=4, color=RED)
    if others is not None:
        axes.plot(*others.T, ".", ms=2, color=AFTER)
    arrows(axes, torch.zeros(2), rows, DARK, 0.006)
    arrows(axes, torch.zeros(2), result[None], AFTER, 0.012)


Draw = Callable[["Axes", Any], None]  # Any: a transform or an aggregator
OF_NEEDS: dict[str, Draw] = {  # in the order of precedence
    "product": draw_product,
    "entering": draw_units,
    "examples": draw_examples,
    "error": draw_product,
    "labels": draw_routed,
}
NORMS = ("adagc", "adaptive_clip", "autoclip", "spike_clip", "update_clip", "zclip")
OF_NAMES: dict[str, Draw] = {
    **dict.fromkeys(NORMS, draw_norms),
    **dict.fromkeys(("low_rank", "muon", "orthogonalize"), draw_matrix),
    **dict.fromkeys(("centered_clip", "geometric_median", "krum", "trimmed_mean"), draw_robust),
    **dict.fromkeys(("feature_distance", "tap"), draw_distance),
    **dict.fromkeys(("gpm", "ogd", "project_subspace"), draw_plane),
    "lrp": draw_relevance,
    "scheduled": draw_steps,
    "sign_agreement": draw_agreement,
    "skip_update": draw_skipped,
    "tgr": draw_tokens,
}

if __name__ == "__main__":
    main(sys.argv[1:])
