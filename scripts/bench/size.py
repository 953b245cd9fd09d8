"""Measure the cost of surgery at the size of a language model: time, and peak memory.

python -m scripts.bench size [--only step memory norm close attach] [--rounds 9]

The parameters have the shapes of GPT-2 with 12 blocks of width 768 and 16,000 tokens: 98 million
entries in 148 tensors. The gradients are random and there is no forward pass.

| row | measured |
|---|---|
| `step` | an optimizer step with surgery at stage `step`, with `clip_grad_norm_`, and plain |
| `memory` | the memory that these steps take at their peak, each in a process of its own |
| `norm` | `norm` of gradsurg and `torch.linalg.vector_norm` of one gradient |
| `close` | detaching a surgery from 1,024, 4,096 and 16,384 parameters |
| `attach` | attaching 128 interventions to 16,384 parameters, and detaching them |

Arms take turns in one process. Times are CPU times of one thread; compare within a run.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects.tables import aligned
from gradsurg.plugins.reductions import norm
from gradsurg.transforms.base import Transform
from scripts.bench.turns import beginning, cpu_seconds, in_turns

WIDTH, BLOCKS, TOKENS = 768, 12, 16_000
STEPS = 3  # timed together
Step = Callable[[], object]
Row = Callable[[int], list[list[str]]]


def parameters(width: int = WIDTH, blocks: int = BLOCKS, tokens: int = TOKENS) -> nn.Module:
    """Return a module with parameters of the shapes of GPT-2, and gradients."""
    vector, square = (width,), (width, width)
    block = [vector, vector, (width, 3 * width), (3 * width,), square, vector]
    block += [vector, vector, (width, 4 * width), (4 * width,), (4 * width, width), vector]
    shapes = [(tokens, width), (1024, width), *block * blocks, vector, vector]
    params = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


ARMS: dict[str, Transform | None] = {
    "plain": None,
    "clip_grad_norm_": None,
    "ClipNorm": gs.ClipNorm(1.0),
    "ClipGlobalNorm": gs.ClipGlobalNorm(1.0),
    "Scale": gs.Scale(0.5),
}


def turn(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Return the CPU milliseconds of a step of an arm, after one that is not timed."""
    step = partial(clipped, model, optimizer) if "_" in name else optimizer.step
    attached = nullcontext()
    if transform := ARMS[name]:
        surgery = gs.Surgery(gs.Intervention(transform, at=gs.Parameters(stage="step")))
        attached = surgery.attach(model, optimizer, effects_every=0)
    with attached:
        step()
        return 1000 * cpu_seconds(step, steps)()


def step_rows(rounds: int) -> list[list[str]]:
    model = parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    ways = {name: partial(turn, name, model, optimizer, STEPS) for name in ARMS}
    middle = {name: median(own) for name, own in in_turns(ways, rounds, warm=1).items()}
    clip = middle["clip_grad_norm_"] - middle["plain"]
    rows = [["step", "ms", "more than plain, ms", "over clip_grad_norm_"]]
    for name, elapsed in middle.items():
        more = elapsed - middle["plain"]
        rows.append([name, f"{elapsed:.1f}", f"{more:.1f}", f"{more / clip:.2f}"])
    return rows


PEAK = """
import torch
from scripts.bench import size
torch.set_num_threads(1)
print(size.peak({name!r}))
"""


def peak(name: str) -> float:
    """Return the megabytes above those before that three steps of an arm take at their peak."""
    model = parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    optimizer.step()
    # The peak becomes the memory in use.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmHWM")
    turn(name, model, optimizer, 2)
    return _status("VmHWM") - before


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1024


def memory_rows(rounds: int) -> list[list[str]]:
    rows = [["memory", "peak above that before, MB", "of all gradients"]]
    total = sum(param.numel() for param in parameters().parameters()) * 4 / 2**20
    for name in ARMS:
        command = [sys.executable, "-c", PEAK.format(name=name)]
        found = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append([name, f"{found:.0f}", f"{found / total:.2f}"])
    return rows


def norm_rows(rounds: int) -> list[list[str]]:
    rows = [["norm", "vector_norm, us", "norm, us", "ratio"]]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for shape in ((3072, 768), (768,)):
            rows.append(_norm_row(torch.randn(shape).to(dtype), rounds))
    return rows


def _norm_row(grad: Tensor, rounds: int) -> list[str]:
    repeats = max(1, 2_000_000 // grad.numel())
    ways = {
        "torch": cpu_seconds(partial(torch.linalg.vector_norm, grad), repeats),
        "ours": cpu_seconds(partial(norm, grad, "tensor"), repeats),
    }
    first, second = (1e6 * median(own) for own in in_turns(ways, 5 * rounds, warm=0).values())
    name = f"{str(grad.dtype).removeprefix('torch.')} {'x'.join(map(str, grad.shape))}"
    return [name, f"{first:.1f}", f"{second:.1f}", f"{second / first:.2f}"]


class Layers(nn.Module):
    """Layers of 128 parameters with four entries each."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        layers = [nn.ParameterList([torch.zeros(4) for _ in range(128)]) for _ in range(num_layers)]
        self.layers = nn.ModuleList(layers)


def _attached(surgery: gs.Surgery, model: nn.Module) -> tuple[float, float]:
    """Return the seconds of attaching and of detaching, with one backward pass in between."""
    began = process_time()
    live = surgery.attach(model, effects_every=0)
    attached = process_time()
    torch.stack(list(model.parameters())).sum().backward()
    closing = process_time()
    live.close()
    return attached - began, process_time() - closing


def close_rows(rounds: int) -> list[list[str]]:
    rows = [["close", "attach, s", "close, s", "close, us a parameter"]]
    surgery = gs.Surgery(gs.Intervention(gs.Clip(1.0)))
    for count in (1024, 4096, 16_384):
        attach, close = _attached(surgery, Layers(count // 128))
        rows.append([f"{count:,}", f"{attach:.3f}", f"{close:.3f}", f"{1e6 * close / count:.1f}"])
    return rows


def attach_rows(rounds: int) -> list[list[str]]:
    rows = [["attach", "attach, s", "close, s"]]
    for count in (1, 16, 128):
        sites = [gs.Parameters(f"layers.{index}.*") for index in range(count)]
        surgery = gs.Surgery(*(gs.Intervention(gs.Clip(1.0), at=site) for site in sites))
        attach, close = _attached(surgery, Layers(128))
        rows.append([f"{count} of 128 layers", f"{attach:.3f}", f"{close:.3f}"])
    return rows


ROWS: dict[str, Row] = {
    "step": step_rows,
    "memory": memory_rows,
    "norm": norm_rows,
    "close": close_rows,
    "attach": attach_rows,
}


def table(rounds: int, only: Sequence[str]) -> str:
    """Return a table for each row of ROWS whose name starts with one of `only`."""
    torch.set_num_threads(1)
    return "\n\n".join(aligned(ROWS[name](rounds)) for name in beginning(ROWS, only))
