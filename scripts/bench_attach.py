"""Time attaching and detaching surgeries by the number of parameters of the model.

    python scripts/bench_attach.py [--sizes 1024,4096,16384] [--interventions 128]

Prints CPU seconds of `start` and `close` for one intervention at all parameters, and for many
interventions at one layer each, for parameters and for module outputs.
"""

import argparse
import time
import warnings
from collections.abc import Callable

from torch import nn

import gradsurg as gs
from gradsurg.sites.places import Selector


def model_of(num_params: int) -> nn.Sequential:
    """Return a chain of linear layers with `num_params` parameters, two a layer."""
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(num_params // 2)))


def seconds(model: nn.Module, sites: list[Selector]) -> tuple[float, float]:
    """Return the CPU seconds to attach an intervention at each of `sites`, and to detach all."""
    surgery = gs.Surgery(*(gs.Intervention(gs.Scale(0.5), at) for at in sites))
    begin = time.process_time()
    live = surgery.start(model)
    attached = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.SurgeryWarning)  # no gradient has passed
        live.close()
    return attached - begin, time.process_time() - attached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", default="1024,4096,16384")
    parser.add_argument("--interventions", type=int, default=128)
    options = parser.parse_args()
    number: int = options.interventions
    cases: dict[str, Callable[[], list[Selector]]] = {
        "1 at all parameters": lambda: [gs.Parameters()],
        "1 at all outputs": lambda: [gs.Outputs()],
        f"{number} at parameters": lambda: [gs.Parameters(f"{i}.*") for i in range(number)],
        f"{number} at outputs": lambda: [gs.Outputs(f"{i}") for i in range(number)],
    }
    print(f"{'parameters':>10}  {'interventions':24}  attach s  detach s")
    for size in map(int, options.sizes.split(",")):
        for name, sites in cases.items():
            attach, detach = seconds(model_of(size), sites())
            print(f"{size:10,}  {name:24}  {attach:8.2f}  {detach:8.2f}", flush=True)


if __name__ == "__main__":
    main()
