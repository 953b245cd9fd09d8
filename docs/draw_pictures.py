"""Draw the pictures of the README, light and dark: python docs/draw_pictures.py PLAIN TUNED

PLAIN and TUNED are the folders of the studies that the README's first two commands train, such as
runs/digits-mlp and runs/tuned. `outcome` shows the difference in both studies above the effects on
gradients in the first one; `effects` is the lower half.
"""

import re
import sys
from pathlib import Path
from textwrap import indent

import polars as pl
import vl_convert

from gradsurg.report import charts
from gradsurg.report.compare import compare
from gradsurg.report.study import read_study

FOLDER = Path(__file__).parent / "pictures"
ROWS = ("both arms at lr 0.4", "each arm at its best lr")
WIDTH, GAP = 470, 14


def drawn(chart: charts.Chart, heading: str) -> tuple[str, float]:
    """Return a chart as SVG, and its height."""
    fit = {"type": "fit-x", "contains": "padding"}
    spec = chart.properties(title=heading, width=WIDTH, autosize=fit).to_dict(validate=False)
    svg = vl_convert.vegalite_to_svg(spec)
    return svg, float(re.findall(r'height="([\d.]+)"', svg)[0])


def stacked(parts: list[tuple[str, float]]) -> str:
    """Return one SVG with the parts below each other."""
    start, lines = 0.0, []
    for number, (svg, height) in enumerate(parts):
        svg = re.sub(r"\bclip(?=\d)", f"part{number}-clip", svg)  # ids of the parts would collide
        lines.append(svg.replace("<svg ", f'<svg y="{start:g}" ', 1))
        start += height + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {start - GAP:g}">'
    paper = f'<rect width="100%" height="100%" fill="{charts.PAPER}"/>'
    return "\n".join([head, indent(paper, "  "), *lines, "</svg>\n"])


def main(plain: Path, tuned: Path) -> None:
    study = read_study(plain)
    frames = []
    for folder, row in zip((plain, tuned), ROWS, strict=True):
        frame = compare(read_study(folder)).filter(pl.col("metric") == "test/accuracy")
        frames.append(frame.with_columns(pl.lit(row).alias("arm")))
    heading = "clip(0.002): mean difference, 95 % interval, each of 8 seeds"
    outcome = drawn(charts.outcome_chart(pl.concat(frames, how="diagonal_relaxed")), heading)
    acted = study.effects.filter(pl.col("transform").cast(pl.String) != "none")
    heading = "clip(0.002): cosine of each gradient before and after"
    effects = drawn(charts.effect_map(charts.effect_frame(acted)), heading)
    for name, parts in {"outcome": [outcome, effects], "effects": [effects]}.items():
        light = dark = stacked(parts)
        for colour, replaced in zip(charts.LIGHT, charts.DARK, strict=True):
            dark = dark.replace(colour, replaced)
        (FOLDER / f"{name}.svg").write_text(light, encoding="utf-8")
        (FOLDER / f"{name}-dark.svg").write_text(dark, encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
