"""Measure what gradsurg costs: python -m scripts.bench [WHAT] [--rounds N] [--only NAME ..]

training     a step with and without surgery (the default)
size         an optimizer step at the size of a language model: time and memory
sites        each kind of site beside a hook written by hand
reading      reading the effects of a step
attribution  guided backpropagation and LRP beside a plain gradient
kernel       the sums of effects beside torch.clamp
compiled     compiled models beside hooks by hand
examples     gradients of single examples
multitask    aggregators beside those of TorchJD
backward     live.backward with two losses beside a plain backward pass
engines      a step of eight tasks beside a plain step
telemetry    measurements of gradient conflicts
runner       the command beside a plain training loop
report       the report of 200 runs of 1000 steps
costs        all tables of docs/costs.md
"""

import argparse
from collections.abc import Callable

from scripts.bench import (
    attribution,
    backward,
    compiled,
    engines,
    examples,
    kernel,
    multitask,
    reading,
    report,
    runner,
    sites,
    size,
    telemetry,
    training,
)

TABLES: dict[str, tuple[int, Callable[[argparse.Namespace], str]]] = {
    "training": (60, lambda args: training.table(args.rounds, args.threads, args.only)),
    "size": (9, lambda args: size.table(args.rounds, args.only)),
    "sites": (60, lambda args: sites.table(args.rounds, args.only)),
    "reading": (200, lambda args: reading.table(args.rounds)),
    "attribution": (60, lambda args: attribution.table(args.rounds)),
    "kernel": (60, lambda args: kernel.table(args.rounds)),
    "compiled": (60, lambda args: compiled.table(args.rounds)),
    "examples": (60, lambda args: examples.table(args.rounds)),
    "multitask": (
        10,
        lambda args: multitask.table(
            args.rounds, args.only, args.sizes or [*multitask.SIZES], args.threads
        ),
    ),
    "backward": (300, lambda args: backward.table(args.rounds)),
    "engines": (3, lambda args: engines.table(args.rounds)),
    "telemetry": (60, lambda args: telemetry.table(args.rounds)),
    "runner": (8, lambda args: runner.table(args.rounds, args.only)),
    "report": (1, lambda args: report.table(args.sizes or [*report.SIZES])),
}
"""The number of rounds by default, and the function that measures."""
ELSEWHERE = ("kernel", "telemetry", "runner")  # not in docs/costs.md


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", nargs="?", choices=[*TABLES, "costs"], default="training", metavar="WHAT"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", default=[""], help="rows that begin so")
    parser.add_argument("--sizes", nargs="+", help="of multitask and report")
    args = parser.parse_args(words)
    if args.what in ("multitask", "costs") and (lacking := multitask.lacking()):
        parser.exit(2, f"{lacking}\n")
    costs = [name for name in TABLES if name not in ELSEWHERE]
    for what in costs if args.what == "costs" else [args.what]:
        rounds, table = TABLES[what]
        given = argparse.Namespace(**vars(args) | {"rounds": args.rounds or rounds})
        print(table(given), flush=True)


if __name__ == "__main__":
    main()
