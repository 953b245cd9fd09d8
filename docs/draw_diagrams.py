"""Draw the two diagrams of docs/concepts.md: python docs/draw_diagrams.py"""

from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

FOLDER = Path(__file__).parent / "diagrams"
MONO = "DejaVu Sans Mono"
INK, FORWARD, BACKWARD, HOOK = "#333333", "#777777", "#1f5fa8", "#c2410c"


def main() -> None:
    mpl.rcParams |= {"svg.hashsalt": "gradsurg", "font.family": "DejaVu Sans", "font.size": 9}
    FOLDER.mkdir(exist_ok=True)
    for name, draw, size in (("sites", sites, (8.2, 3.5)), ("stages", stages, (8.2, 2.7))):
        figure, axes = plt.subplots(figsize=size)
        axes.set_axis_off()
        draw(axes)
        figure.savefig(FOLDER / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)


def sites(axes: Axes) -> None:
    """A linear layer, a ReLU and a loss: tensors, operations, and the hook of each kind of site."""
    axes.set(xlim=(0, 10), ylim=(0, 4.4))
    operations = ((2.6, "linear", "Addmm"), (5.8, "relu", "Relu"), (9.2, "loss", "loss"))
    for x, module, node in operations:
        _box(axes, x, 3.3, module, FORWARD)
        _box(axes, x, 1.5, node, INK)
    for start, stop, name in ((0.2, 2.0, "x"), (3.2, 5.2, "h"), (6.4, 8.6, "a")):
        _arrow(axes, (start, 3.3), (stop, 3.3), FORWARD)
        axes.text((start + stop) / 2, 3.42, name, ha="center", color=FORWARD)
        _arrow(axes, (stop, 1.5), (start, 1.5), BACKWARD)
        axes.text((start + stop) / 2, 1.62, f"grad of {name}", ha="center", color=BACKWARD)
    _arrow(axes, (2.6, 1.15), (2.6, 0.5), BACKWARD)
    axes.text(2.45, 0.2, "grad of weight", ha="right", color=BACKWARD)
    for x, y, text in (
        (4.2, 3.85, 'Activations("linear")'),
        (4.2, 2.0, 'Nodes("Relu", side="leave")'),
        (7.75, 2.0, 'Nodes("Relu")'),
        (1.1, 1.1, 'Inputs("linear")'),
        (4.2, 1.1, 'Outputs("linear")'),
        (7.5, 1.1, 'Outputs("relu")'),
        (4.3, 0.27, 'Parameters("linear.weight")'),
    ):
        axes.text(x, y, text, ha="center", va="center", color=HOOK, family=MONO, size=8)
    axes.text(0, 4.15, "forward", color=FORWARD, weight="bold")
    axes.text(0, 2.2, "backward", color=BACKWARD, weight="bold")


def stages(axes: Axes) -> None:
    """One optimizer step of two backward passes: the moments at which a hook can act."""
    axes.set(xlim=(0, 10), ylim=(0, 3))
    axes.annotate("", (10, 1.5), (0, 1.5), arrowprops={"arrowstyle": "->", "color": INK})
    for start, stop, text in (
        (0.2, 3.3, "loss.backward(), first batch"),
        (3.5, 6.6, "loss.backward(), second batch"),
        (6.9, 9.7, "optimizer.step()"),
    ):
        axes.plot([start, start, stop, stop], [1.9, 2.0, 2.0, 1.9], color=FORWARD)
        axes.text((start + stop) / 2, 2.15, text, ha="center", color=INK)
    for x, text, is_stage in (
        (0.7, "backward", True),
        (1.75, ".grad += g", False),
        (2.8, "accumulated", True),
        (4.0, "backward", True),
        (5.05, ".grad += g", False),
        (6.1, "accumulated", True),
        (7.25, "step", True),
        (8.3, "update", False),
        (9.3, "Updates,\nWeights", True),
    ):
        color = HOOK if is_stage else INK
        axes.plot([x, x], [1.4, 1.6], color=color, linewidth=2)
        below = 1.25 if is_stage else 0.85
        axes.text(x, below, text, ha="center", va="top", color=color, size=8, family=MONO)


def _box(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    box = {"boxstyle": "round,pad=0.4", "edgecolor": color, "facecolor": "white"}
    axes.text(x, y, text, ha="center", va="center", color=color, bbox=box)


def _arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], color: str) -> None:
    axes.annotate("", stop, start, arrowprops={"arrowstyle": "->", "color": color})


if __name__ == "__main__":
    main()
