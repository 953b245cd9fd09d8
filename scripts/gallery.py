"""Write docs/gallery.md and its pictures: python scripts/gallery.py [NAME ..]

With names, only their pictures; `scripts/stub.py` writes the text alone. Needs matplotlib. Each
picture is drawn from the transform or aggregator itself; fields that would not be visible at their
defaults are those of ILLUSTRATED.
"""

import io
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from torch import Tensor

import gradsurg as gs
from gradsurg.aggregators.base import Aggregator, AggregatorContext
from gradsurg.experiment import catalogue
from gradsurg.experiment.catalogue import Entry
from gradsurg.experiment.compose import CONFIG_DIR
from gradsurg.experiment.making import make
from gradsurg.transforms.base import Transform, TransformContext
from gradsurg.triggers.base import Clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURES = DOCS / "gallery.md", DOCS / "gallery"
DRAWN = ("transform", "aggregator")

BEFORE, AFTER, SECOND, LINE = "#a3a3a3", "#1d4ed8", "#dc2626", "#d4d4d4"
STYLE: dict[Any, Any] = {"font.size": 7, "font.family": "DejaVu Sans", "axes.edgecolor": "#737373"}
STYLE |= {"xtick.color": "#525252", "ytick.color": "#525252", "axes.labelcolor": "#404040"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6}
STYLE |= {"legend.frameon": False, "legend.fontsize": 6.5, "legend.handlelength": 1.4}

OF_ROWS = {"Centralize": (1, 2)}
"""The shape of the two entries of a picture, for transforms of rows."""

ILLUSTRATED: dict[str, dict[str, Any]] = yaml.safe_load("""
adagc: {warmup: 5, max_norm: 100.0, decay: 0.9}
adaptive_clip: {warmup: 20, max_norm: 100.0}
add_decayed: {strength: 0.4}
add_noise: {eta: 0.2}
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
noise: {sigma: 0.4}
norm_matched: {of: {_target_: gradsurg.Clip, value: 1.0}}
qsgd: {per: unit}
quantize: {levels: 3}
route: {groups: [[0], [1]]}
scale: {factor: 0.5}
soft_threshold: {amount: 0.8}
spike_clip: {threshold: 4.0, decay: 0.9}
trimmed_mean: {beta: 0.2}
trust_ratio: {coefficient: 0.5}
zclip: {warmup: 20, max_norm: 100.0}
""")
WEIGHTS = torch.tensor([1.6, 0.9])


def main(wanted: list[str]) -> None:
    """Write the page, and the pictures of these names, or all."""
    PICTURES.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    entries = [entry for group in DRAWN for entry in catalogue.list(group)]
    for old in {path.stem for path in PICTURES.glob("*.png")} - {picture(e) for e in entries}:
        (PICTURES / f"{old}.png").unlink()
    for entry in entries:
        if not wanted or entry.name in wanted:
            store(entry)


def page() -> str:
    """Return the text of the page, with its tables written anew."""
    text = PAGE.read_text(encoding="utf-8")
    recipes = [*catalogue.list("experiment"), *catalogue.list("surgery")]
    tables = {"Recipes": [entry for entry in recipes if entry.paper]}
    tables |= {f"{group.title()}s": [*catalogue.list(group)] for group in DRAWN}
    for title, entries in tables.items():
        above, _, rest = text.partition(f"## {title}\n")
        begin, line, rows = rest.partition("|---|---|\n")
        below = rows[match.start() :] if (match := re.search(r"^(?!\|)", rows, re.M)) else ""
        table = "".join(f"{row(entry)}\n" for entry in entries)
        text = f"{above}## {title}\n{begin}{line}{table}{below}"
    return text


def row(entry: Entry) -> str:
    """Return the line of one entry."""
    is_recipe = entry.group in ("experiment", "surgery")
    lines = [f"{entry.summary}." if is_recipe else f"**`{entry.name}`** {entry.summary}."]
    if entry.preset_of:
        lines.append(f"Preset of `{entry.preset_of}`.")
    most = max(len(one.stages) for one in catalogue.list(entry.group))
    words = ", ".join(key.replace("_", " ") for key in entry.properties)
    lines += [f"Properties: {words}."] if words else []
    lines += [f"Stages: {', '.join(entry.stages)}."] if 0 < len(entry.stages) < most else []
    lines += [f"[{entry.paper}]({entry.url})" if entry.url else entry.paper] if entry.paper else []
    fields = None if is_recipe else ILLUSTRATED.get(entry.name)
    shown = (
        yaml.safe_dump(fields, default_flow_style=True, width=1000).strip()[1:-1] if fields else ""
    )
    lines += [f"Drawn with {shown}."] if shown else []
    if is_recipe:
        return f"| `{entry.name}` | {'<br>'.join([*lines[:-1], f'`{entry.command}`', lines[-1]])} |"
    image = f'<img src="gallery/{picture(entry)}.png" width="240" alt="{entry.name}">'
    return f"| {image} | {'<br>'.join(lines)} |"


def picture(entry: Entry) -> str:
    """Return the name of the file of a picture."""
    return f"{entry.group}_{entry.name}"


def store(entry: Entry) -> Path:
    """Draw the picture of an entry into its file, with few colors, and return its path."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from PIL import Image

    mpl.use("agg")
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(2.4, 1.6), dpi=200, layout="constrained")
        drawn = made(entry)
        drawer(entry, drawn)(axes, drawn)
        buffer = io.BytesIO()
        figure.savefig(buffer, facecolor="white")
        plt.close(figure)
    image = Image.open(buffer).convert("RGB").quantize(48)
    image.save(path := PICTURES / f"{picture(entry)}.png", optimize=True)
    return path


def made(entry: Entry) -> Any:  # Any: a transform or an aggregator
    """Return the transform or aggregator of an entry, with the illustrated fields."""
    text = (CONFIG_DIR / entry.group / f"{entry.name}.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    config = config[entry.name] if entry.group == "transform" else config
    base = Transform if entry.group == "transform" else Aggregator
    return make({**config, **ILLUSTRATED.get(entry.name, {})}, base)


def drawer(entry: Entry, transform: Any) -> "Callable[[Axes, Any], None]":  # Any: as of `made`
    """Return the function that draws an entry."""
    if entry.name in ALONE:
        return ALONE[entry.name]
    if entry.group == "aggregator":
        return draw_tasks
    for need, draw in OF_NEEDS.items():
        if need in entry.needs:
            return draw
    if transform.init(torch.zeros(8, 8)):
        return draw_steps
    if entry.name.endswith(("_surrogate", "surrogate_gradient")):
        return draw_window
    if "deterministic" not in entry.properties:
        return draw_histogram
    if "elementwise" in entry.properties and "value" not in entry.needs:
        return draw_graph
    return draw_plane


def applied(transform: Transform, grad: Tensor, context: TransformContext | None = None) -> Tensor:
    """Return the result of a transform in its first state."""
    return transform.update(grad, transform.init(grad), context or TransformContext("a"))[0]


def named(axes: "Axes", label: str, result: str = "", legend: Any = "", ticks: bool = True) -> None:
    """Name the axes, and draw a legend at a place."""
    axes.set_xlabel(label, labelpad=1)
    axes.set_ylabel(result, labelpad=1)
    if legend:
        axes.legend(loc=legend)
    if not ticks:
        axes.set_xticks([])


def cross(axes: "Axes", label: str = "", result: str = "") -> None:
    """Draw the two axes through zero, named."""
    axes.axhline(0, color=LINE, lw=0.6, zorder=0)
    axes.axvline(0, color=LINE, lw=0.6, zorder=0)
    named(axes, label, result)


def squared(axes: "Axes", ticks: Sequence[float] = ()) -> None:
    """Give both axes the same scale and ticks."""
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)


def bars(axes: "Axes", before: Tensor, after: Tensor, label: str) -> None:
    """Draw the entries of two vectors, the second in front of the first."""
    axes.bar(np.arange(len(before)), before, color=BEFORE, alpha=0.6, width=0.8)
    axes.bar(np.arange(len(after)), after, color=AFTER, width=0.4)
    axes.axhline(0, color=LINE, lw=0.6)
    named(axes, label, ticks=False)


def draw_graph(axes: "Axes", transform: Transform) -> None:
    """Draw the result of one entry as a function of it."""
    x = torch.linspace(-3, 3, 1201)
    y = applied(transform, x)
    jumps = (y.diff().abs() > 0.2).nonzero().flatten() + 1
    cross(axes, "entry of the gradient", "result")
    axes.plot(x, x, color=BEFORE, lw=1, ls=(0, (4, 3)))
    if applied(transform, torch.tensor([math.nan])).isfinite().all():
        axes.text(-2.9, 2.6, "NaN becomes 0")
    for part_x, part_y in zip(np.split(x, jumps), np.split(y, jumps), strict=True):
        axes.plot(part_x, part_y, color=AFTER, lw=1.8, marker="." if len(part_x) == 1 else None)
    axes.set_ylim(-3.2, 3.2)


def draw_entering(axes: "Axes", transform: Transform) -> None:
    """Draw the result at a ReLU as a function of the gradient that enters its node."""
    e = torch.linspace(-2, 2, 401)
    cross(axes)
    for active, style in ((1.0, "-"), (0.0, (0, (2, 1.5)))):
        name = "active" if active else "inactive"
        axes.plot(e, e * active, color=BEFORE, lw=3.5 if active else 1.5, ls=style)
        result = applied(transform, e * active, TransformContext("a", entering=(e,)))
        offset = 0.05 if active else -0.05
        axes.plot(e, result + offset, color=AFTER, lw=1.6, ls=style, label=name)
    named(axes, "gradient that enters the ReLU", "result", "upper left")


def draw_window(axes: "Axes", transform: Transform) -> None:
    """Draw the factor of a gradient as a function of the value."""
    x = torch.linspace(-2.5, 2.5, 801)
    cross(axes, "value", "factor")
    factor = applied(transform, torch.ones_like(x), TransformContext("a", value=x))
    axes.plot(x, (x > 0).float(), color=BEFORE, lw=1, ls=(0, (4, 3)))
    axes.fill_between(x, factor, color=AFTER, alpha=0.12, lw=0)
    axes.plot(x, factor, color=AFTER, lw=1.8)


def polar() -> Iterator[Tensor]:
    """Yield circles and rays of gradients with two entries."""
    for radius in (0.5, 1.0, 1.5, 2.0):
        yield radius * directions(torch.linspace(0, 2 * math.pi, 361))
    yield from torch.linspace(0.02, 2, 100)[:, None] * directions(RAYS)[:, None]


def directions(angles: Tensor) -> Tensor:
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


RAYS = torch.linspace(0, 2 * math.pi, 13)[:-1]


def draw_map(
    axes: "Axes",
    result: Callable[[Tensor], Tensor],
    before: Callable[[Tensor], Tensor],
    arrows: bool = True,
) -> None:
    """Draw circles and rays of gradients before and after a function of two entries."""
    cross(axes)
    for curve in polar():
        axes.plot(*stacked(before, curve).T, color=BEFORE, lw=0.5, alpha=0.7, zorder=1)
        axes.plot(*stacked(result, curve).T, color=AFTER, lw=0.9, zorder=3)
    for point in 1.75 * directions(RAYS + math.pi / 12) if arrows else ():
        start, end = before(point), result(point)
        if float((end - start).norm()) > 0.05:
            arrow(axes, end, SECOND, 0.7, start)
    squared(axes, [-2, 0, 2])


def stacked(function: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    return torch.stack([function(point) for point in points])


def draw_plane(axes: "Axes", transform: Transform) -> None:
    """Draw a function of two entries; WEIGHTS are the weights, or the gradient of an update."""
    shape = OF_ROWS.get(type(transform).__name__, (2,))

    def result(point: Tensor) -> Tensor:
        context = TransformContext("a", value=WEIGHTS.view(shape), gradient=WEIGHTS.view(shape))
        return applied(transform, point.view(shape), context).flatten()

    draw_map(axes, result, lambda point: point)
    label = {"value": "w", "gradient": "g"}
    for need in transform.needs:  # g: the gradient, where updates are transformed
        arrow(axes, WEIGHTS, "#171717", 1.2)
        axes.text(1.7, 0.95, label[need], fontsize=7)


def draw_product(axes: "Axes", transform: Transform) -> None:
    """Draw the gradient of a layer's input, for circles and rays of gradients of its output."""
    weights = torch.tensor([[0.9, -0.3], [0.2, 0.8]])

    def result(point: Tensor) -> Tensor:
        info = Clock(error=point[None])
        context = TransformContext("b", backward=info, entering=(point[None],))
        return applied(transform, (point @ weights)[None], context)[0]

    draw_map(axes, result, lambda point: point @ weights, arrows=False)


def draw_examples_by_label(axes: "Axes", transform: Transform) -> None:
    """Draw the gradient of 8 units for 12 examples with two labels."""
    labels = torch.tensor([0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0])

    info = Clock(batch={"labels": labels})
    result = applied(transform, torch.ones(12, 8), TransformContext("a", backward=info))
    axes.imshow(result, cmap="Blues", vmin=-0.2, vmax=1.3, aspect="auto")
    axes.set_yticks(range(12), [f"label {label}" for label in labels.tolist()], fontsize=5)
    named(axes, "units of an activation", ticks=False)


def draw_histogram(axes: "Axes", transform: Transform) -> None:
    """Draw the distribution of the entries of a random gradient before and after."""
    grad = torch.randn(1250, 16, generator=torch.Generator().manual_seed(0))
    if type(transform).__name__ == "AddNoise":
        grad = 1.5 * grad.sign() + 0.15 * grad
    grad, result = grad.flatten(), applied(transform, grad).flatten()
    bins = np.linspace(-4, 4, 81).tolist()
    axes.hist(grad.numpy(), bins=bins, color=BEFORE, alpha=0.6, label="before")
    axes.hist(result.numpy(), bins=bins, color=AFTER, histtype="step", lw=1.3, label="after")
    axes.set_yscale("symlog", linthresh=1000)
    axes.tick_params(left=False, labelleft=False, which="both")
    axes.set_ylim(0)
    named(axes, "entry of the gradient", legend="upper right")


def signal(steps: int) -> Tensor:
    """Return gradients of 8 x 8 entries over the steps: slow waves with noise."""
    generator = torch.Generator().manual_seed(3)
    phase = 2 * math.pi * torch.rand(8, 8, generator=generator)
    phase[0, 0] = 0
    time = torch.arange(steps)[:, None, None]
    noise = torch.randn(steps, 8, 8, generator=generator)
    return torch.sin(2 * math.pi * time / 70 + phase) + 0.4 * noise


def over_steps(transform: Transform, grads: Tensor) -> Tensor:
    """Return the results of a sequence of gradients."""
    state, results = transform.init(grads[0]), []
    for step, grad in enumerate(grads):
        result, state = transform.update(grad, state, TransformContext("a", step=step))
        results.append(result)
    return torch.stack(results)


def draw_steps(axes: "Axes", transform: Transform) -> None:
    """Draw one entry over the steps."""
    name = type(transform).__name__
    grads = torch.ones(1500, 1, 1) if name == "Scheduled" else signal(140)
    if name == "SpikeClip":
        grads[60:140:25] *= 6
    results = over_steps(transform, grads)
    cross(axes)
    axes.plot(grads[:, 0, 0], color=BEFORE, lw=1.2, label="before")
    axes.plot(results[:, 0, 0], color=AFTER, lw=1.3, label="after")
    named(axes, "step", "one entry", "lower left" if name == "Scheduled" else "")


def draw_norms(axes: "Axes", transform: Transform) -> None:
    """Draw the norm of a gradient with spikes over the steps."""
    generator = torch.Generator().manual_seed(1)
    sizes = (
        1 + 0.5 * torch.exp(-torch.arange(120) / 30) + 0.12 * torch.randn(120, generator=generator)
    )
    sizes[[45, 70, 95]] *= 3
    grads = sizes[:, None] * torch.tensor([0.6, 0.8])
    results = over_steps(transform, grads)
    axes.plot(grads.norm(dim=1), color=BEFORE, lw=1.6)
    axes.plot(results.norm(dim=1), color=AFTER, lw=1.2)
    axes.set_ylim(0)
    named(axes, "step", "norm")


def draw_agreement(axes: "Axes", transform: Transform) -> None:
    """Draw the sum of four micro-batches and its masked result, entry by entry."""
    generator = torch.Generator().manual_seed(2)
    mean = torch.tensor([1.0, -0.8, 0.1, 0.6, -0.05, 1.2, -0.2, -1.1, 0.3, 0.0, 0.9, -0.6])
    grads = mean + 0.35 * torch.randn(4, 12, generator=generator)
    state, total = transform.init(grads[0]), torch.zeros(12)
    for call, grad in enumerate(grads):
        result, state = transform.update(grad, state, TransformContext("a", call=call))
        total = total + result
    for grad in grads:
        axes.plot(np.arange(12), grad, ls="", marker=".", ms=2.5, color="#525252", zorder=3)
    bars(axes, grads.sum(0), total, "entries; dots: four micro-batches")


def draw_tokens(axes: "Axes", transform: Transform) -> None:
    """Draw one channel of the gradients of ten tokens before and after."""
    grad = torch.randn(10, 1, generator=torch.Generator().manual_seed(5))
    bars(axes, grad[:, 0], applied(transform, grad)[:, 0], "tokens, in one channel")


def draw_examples(axes: "Axes", transform: Transform) -> None:
    """Draw the gradients of seven examples, their mean and the result; dots: other draws."""
    rows = seven()

    def result(seed: int) -> Tensor:
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        surgery = gs.Surgery(gs.Intervention(transform), seed=seed)
        with surgery.attach(model, optimizer, effects_every=0):
            model(rows).mean().backward()  # the gradient of an example is its row
            optimizer.step()
        assert model.weight.grad is not None
        return model.weight.grad[0]

    draw_arrows(axes, rows, result(0))
    if "deterministic" not in transform.properties:
        draws = torch.stack([result(seed) for seed in range(1, 100)])
        axes.plot(*draws.T, ls="", marker=".", ms=2, color=AFTER, alpha=0.6)


def draw_matrix(axes: "Axes", transform: Transform) -> None:
    """Draw the singular values of a matrix before and after."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(16, 10, generator=generator) @ torch.diag(0.8 ** torch.arange(10.0)) / 4
    result = over_steps(transform, grad.expand(5, 16, 10))[-1]
    where = np.arange(10)
    axes.bar(where - 0.2, torch.linalg.svdvals(grad), width=0.4, color=BEFORE, label="before")
    axes.bar(where + 0.2, torch.linalg.svdvals(result), width=0.4, color=AFTER, label="after")
    named(axes, "singular values of a matrix", legend="upper right", ticks=False)


def arrow(axes: "Axes", end: Tensor, color: str, width: float, start: Tensor | None = None) -> None:
    """Draw an arrow, from zero without a `start`."""
    props = {"arrowstyle": "-|>", "color": color, "lw": width, "shrinkA": 0, "shrinkB": 0}
    (x, y), (from_x, from_y) = end.tolist(), (0.0, 0.0) if start is None else start.tolist()
    props["mutation_scale"] = 5 if width < 1 else 7
    axes.annotate("", (x, y), (from_x, from_y), arrowprops=props)


def merged(aggregator: Aggregator, rows: Tensor) -> Tensor:
    """Return the aggregate after ten equal steps, with decreasing losses."""
    state = aggregator.init(len(rows))
    result = rows.sum(0)
    for step in range(10):
        losses = torch.tensor([1.0 - 0.05 * step, 0.5 - 0.005 * step], dtype=torch.float64)
        group = f"{rows[1, 0]}"  # another draw for each angle
        context = AggregatorContext(step=step, group=group, losses=losses[: len(rows)])
        result, state = aggregator.merge(rows, state, context)
    return result


def draw_tasks(axes: "Axes", aggregator: Aggregator) -> None:
    """Draw two gradients in conflict, their aggregate, and the aggregates of other angles."""
    first = torch.tensor([1.5, 0.2])
    seconds = directions(torch.linspace(0, 2 * math.pi, 121) + 1e-3)
    locus = stacked(lambda other: merged(aggregator, torch.stack([first, other])), seconds)
    second = directions(torch.tensor(2.2))
    cross(axes)
    axes.plot(*seconds.T, color=BEFORE, lw=0.5, ls=(0, (3, 2)))
    marks = {"ls": "", "marker": ".", "ms": 2} if locus.diff(dim=0).norm(dim=1).max() > 0.8 else {}
    axes.plot(*locus.T, color=AFTER, lw=0.9, alpha=0.7, **marks)
    arrow(axes, first, "#525252", 1.0)
    arrow(axes, second, "#525252", 1.0)
    arrow(axes, merged(aggregator, torch.stack([first, second])), AFTER, 1.8)
    squared(axes)


def draw_robust(axes: "Axes", aggregator: Aggregator) -> None:
    """Draw the gradients of seven tasks, of which one is far away, their mean and the aggregate."""
    rows, state = seven(), aggregator.init(7)
    draw_arrows(axes, rows, aggregator.merge(rows, state, AggregatorContext())[0])


def seven() -> Tensor:
    """Return seven gradients, of which the first is far away."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.tensor([0.6, 0.5]) + 0.3 * torch.randn(7, 2, generator=generator)
    rows[0] = torch.tensor([-2.4, 1.9])
    return rows


def draw_arrows(axes: "Axes", rows: Tensor, result: Tensor) -> None:
    """Draw several gradients, their mean and a result."""
    cross(axes)
    for one in rows:
        arrow(axes, one, BEFORE, 0.7)
    axes.plot(*rows.mean(0), marker="x", ms=5, color=SECOND, ls="", label="mean")
    arrow(axes, result, AFTER, 1.8)
    axes.plot(*rows.T, ls="", marker=".", ms=3, color="#525252")
    axes.legend(loc="upper right")
    squared(axes)


def draw_skipped(axes: "Axes", transform: Transform) -> None:
    """Draw a weight under SGD with momentum, one of whose gradients is infinite."""
    bad, steps = 6, 14
    for change, color, label in ((gs.Sanitize(), BEFORE, "zeroed"), (transform, AFTER, "skipped")):
        weight = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(weight.weight)
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.1, momentum=0.9)
        surgery = gs.Surgery(gs.Intervention(change, at=gs.Parameters(stage="step")))
        path = [0.0]
        with surgery.attach(weight, optimizer):
            for step in range(steps):
                weight.weight.grad = torch.tensor([[math.inf if step == bad else -1.0]])
                optimizer.step()
                path.append(weight.weight.item())
        axes.plot(path, color=color, lw=1.4, marker=".", ms=4, label=label)
    axes.axvspan(bad, bad + 1, color=SECOND, alpha=0.15, lw=0)
    axes.text(bad - 0.2, 0.1, "g = inf", ha="right", color=SECOND)
    named(axes, "step", "a weight", "upper left")


def draw_distance(axes: "Axes", transform: Transform) -> None:
    """Draw what is added to a gradient of zero over the value, for a first value of one."""
    values = torch.linspace(-2.0125, 2.9875, 201)[:, None]  # not zero, where the slope is infinite
    grad = torch.zeros_like(values)
    first = TransformContext("a", 0, torch.ones_like(values))
    state = transform.update(grad, transform.init(grad), first)[1]
    added = transform.update(grad, state, TransformContext("a", 1, values))[0]
    axes.plot(values.flatten(), added.flatten(), color=AFTER, lw=1.4)
    axes.axvline(1.0, color=LINE, lw=0.8)
    axes.text(1.1, axes.get_ylim()[0], "z0", va="bottom", color=SECOND)
    named(axes, "value z", "added gradient")


def draw_updates(axes: "Axes", transform: Transform) -> None:
    """Draw the sizes of AdamW's updates, with a gradient that grows at a step."""
    layer, state, sizes = torch.nn.Linear(4, 4, bias=False), transform.init(torch.zeros(4, 4)), []
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1.0, weight_decay=0.0)
    for step in range(40):
        grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        grad *= 20.0 if step >= 25 else 1.0
        layer.weight.grad, before = grad, layer.weight.detach().clone()
        optimizer.step()
        update = layer.weight.detach() - before
        context = TransformContext("a", step=step, gradient=grad)
        clipped, state = transform.update(update, state, context)
        sizes.append([each.square().mean().sqrt().item() for each in (update, clipped)])
    axes.plot([size for size, _ in sizes], color=BEFORE, lw=1.2, label="AdamW")
    axes.plot([size for _, size in sizes], color=AFTER, lw=1.2, label="clipped")
    named(axes, "step (gradients x 20 from 25 on)", "rms of the update / lr", "upper left")


def draw_relevance(axes: "Axes", transform: Transform) -> None:
    """Draw value times gradient of the inputs of a layer of one unit, with and without a rule."""
    layer = torch.nn.Linear(5, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.9, -0.7, 0.5, -0.4, 0.3]]))
        layer.bias.zero_()
    for at, color, label in ((None, BEFORE, "gradient"), (transform, AFTER, "z-plus rule")):
        x = torch.tensor([[1.0, 1.0, -0.6, -1.2, 1.4]], requires_grad=True)
        acting = [gs.Intervention(at, at=gs.Inputs())] if at else []
        with gs.Surgery(*acting).attach(layer):
            layer(x).sum().backward()
        assert x.grad is not None
        places = torch.arange(5) + (0.2 if at else -0.2)
        axes.bar(places, (x * x.grad)[0].detach(), 0.38, color=color, label=label)
    axes.axhline(0, color=LINE, lw=0.6, zorder=0)
    named(axes, "input of the layer", "relevance", "upper right")


OF_NEEDS: "dict[str, Callable[[Axes, Any], None]]" = {  # in the order of precedence
    "product": draw_product,
    "entering": draw_entering,
    "examples": draw_examples,
    "error": draw_product,
    "labels": draw_examples_by_label,
}
ALONE: "dict[str, Callable[[Axes, Any], None]]" = {
    **dict.fromkeys(("adagc", "adaptive_clip", "autoclip", "zclip"), draw_norms),
    **dict.fromkeys(("low_rank", "muon", "orthogonalize"), draw_matrix),
    **dict.fromkeys(("centered_clip", "geometric_median", "krum", "trimmed_mean"), draw_robust),
    **dict.fromkeys(("feature_distance", "tap"), draw_distance),
    **dict.fromkeys(("gpm", "ogd", "project_subspace"), draw_plane),
    "lrp": draw_relevance,
    "scheduled": draw_steps,
    "sign_agreement": draw_agreement,
    "skip_update": draw_skipped,
    "tgr": draw_tokens,
    "update_clip": draw_updates,
}

if __name__ == "__main__":
    main(sys.argv[1:])
