"""Check gradsurg on a GPU, in at most five minutes: `python scripts/check_gpu.py [CHECK ...]`.

Prints a table. The exit code is 0 if all checks pass, 1 if one fails, 2 without a GPU for CUDA.
`--device cpu` runs what has a meaning there, to test this script.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter

import torch
from bench.turns import Arm, in_turns
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects import sums
from gradsurg.effects.tables import aligned
from gradsurg.plugins.reductions import norm
from gradsurg.sites.places import Stage
from gradsurg.transforms.base import Transform

BOUND = 0.001
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LIMIT = 1.25  # of the time of a step with gradsurg over that by hand
Check = Callable[[torch.device], str]
"""Raises AssertionError, or another error, on a failure; returns figures for the table."""


def pairs(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield gradients before and after a transform, in all layouts."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(300, 401, generator=generator).to(device, dtype)
    after = (1.5 * before).clamp(-1, 1)
    after[:50] *= -1
    after[50:100] = before[50:100]
    after[100:120] = 0
    yield "plain", before, after
    yield "transposed", before.t(), after.t()
    yield "one transposed", before, after.t().contiguous().t()
    yield "strided", before[::2, ::3], after[::2, ::3]
    yield "strided vector", before.view(-1)[::7], after.view(-1)[::7]
    yield "one entry", before[0, 0], after[0, 0]
    yield "empty", before[:0], after[:0]
    odd, odd_after = before.clone(), after.clone()
    odd[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    odd_after[0, 2:5] = torch.tensor([torch.nan, torch.inf, torch.nan])
    odd_after[0, 0] = torch.nan
    yield "not finite", odd, odd_after


def measured(before: Tensor, after: Tensor) -> Tensor:
    """Return the sums of a pair as they are measured on its device."""
    if not before.is_cpu:
        return sums.eager_sums(before, after).cpu().double()
    result = torch.zeros(1, sums.NUM_SUMS, dtype=torch.float64)
    sums.add_on_cpu(before, after, result, 0)
    return result[0]


def sums_equal(device: torch.device) -> str:
    """Sums of the effects are those in float64."""
    count = 0
    for dtype in DTYPES:
        for name, before, after in pairs(dtype, device):
            expected = sums.eager_sums(before.cpu().double(), after.cpu().double())
            found = measured(before, after)
            close = torch.allclose(found, expected, rtol=1e-5, equal_nan=True)
            assert close, f"{name}, {dtype}: {found.tolist()}, not {expected.tolist()}"
            count += 1
    return f"{count} pairs"


def norms_equal(device: torch.device) -> str:
    """Norms are those in float64, of tiny and huge entries too."""
    count = 0
    for dtype in DTYPES:
        for scale in (0.0, 1e-30, 1e-3, 1.0, 1e30):
            grad = (scale * torch.randn(64, 33, dtype=torch.float64)).to(device, dtype)
            for per, dim in (("tensor", (0, 1)), ("unit", (1,))):
                exact = torch.linalg.vector_norm(grad.double(), dim=dim, keepdim=True)
                assert torch.allclose(norm(grad, per).double(), exact, rtol=1e-5), (dtype, scale)
                count += 1
    return f"{count} norms"


class Training(Arm):
    """A small network that is trained with or without surgery."""

    def __init__(self, device: torch.device, stack: ExitStack, layers: int = 6) -> None:
        super().__init__(lambda: _network(device, layers), stack)
        self.targets = torch.randint(10, (64,)).to(device)

    def loss(self) -> Tensor:
        return nn.functional.cross_entropy(self.call(self.inputs), self.targets)

    def steps(self, count: int = 3) -> Tensor:
        """Train and return all weights."""
        for _ in range(count):
            self.step()
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def _network(device: torch.device, layers: int, width: int = 256) -> tuple[nn.Module, Tensor]:
    pairs = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*pairs, nn.Linear(width, 10))
    return model.to(device), torch.randn(64, width).to(device)


def no_waiting(device: torch.device) -> str:
    """A step whose effects are measured does not wait for the device."""
    counts = []
    surgeries: list[tuple[Transform, Stage]] = [
        (gs.Clip(BOUND), "backward"),
        (gs.ClipNorm(0.1), "backward"),
        (gs.ClipNorm(0.1), "step"),
        (gs.ClipGlobalNorm(0.1), "step"),
    ]
    for transform, stage in surgeries:
        with ExitStack() as stack:
            training = Training(device, stack)
            live = training.attach(transform, gs.Parameters(stage=stage), every=1)
            training.steps()  # first steps check results, which may wait
            if device.type == "cuda":
                stack.callback(torch.cuda.set_sync_debug_mode, "default")
                torch.cuda.set_sync_debug_mode("error")
            training.step()
            counts.append(len(live.effects.rows()))
    return f"{len(counts)} surgeries, {sum(counts)} sites"


def clip_as_torch(device: torch.device) -> str:
    """ClipGlobalNorm trains as `clip_grad_norm_`."""
    with ExitStack() as stack:
        ours, theirs = Training(device, stack), Training(device, stack)
        params = list(theirs.model.parameters())
        theirs.before_step = lambda: nn.utils.clip_grad_norm_(params, 0.1)
        ours.attach(gs.ClipGlobalNorm(0.1), gs.Parameters(stage="step"), every=1)
        return _compared(ours.steps(), theirs.steps(), 1e-5)


def amp(device: torch.device) -> str:
    """ClipNorm with autocast and a GradScaler is that after `scaler.unscale_`."""
    low = torch.float16 if device.type == "cuda" else torch.bfloat16
    scalers = [torch.amp.GradScaler(device.type, init_scale=1024.0) for _ in range(2)]

    def step(training: Training, scaler: torch.amp.GradScaler, by_hand: bool) -> None:
        training.optimizer.zero_grad()
        with torch.autocast(device.type, dtype=low):
            loss = training.loss()
        scaler.scale(loss).backward()
        if by_hand:
            scaler.unscale_(training.optimizer)
            for param in training.model.parameters():
                nn.utils.clip_grad_norm_([param], 0.1)
        scaler.step(training.optimizer)
        scaler.update()

    with ExitStack() as stack:
        ours, theirs = Training(device, stack), Training(device, stack)
        clip = gs.Intervention(gs.ClipNorm(0.1, eps=1e-6), at=gs.Parameters(stage="step"))
        surgery = gs.Surgery(clip)
        stack.enter_context(surgery.attach(ours.model, ours.optimizer, scaler=scalers[0]))
        for _ in range(3):
            step(ours, scalers[0], by_hand=False)
            step(theirs, scalers[1], by_hand=True)
        return _compared(ours.steps(0), theirs.steps(0), 1e-4)


def compiled(device: torch.device) -> str:
    """A compiled model trains as a plain one with the same surgery."""
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    with ExitStack() as stack:
        ours, theirs = Training(device, stack), Training(device, stack)
        ours.call = torch.compile(ours.model, backend=backend)
        for arm in (ours, theirs):
            arm.attach(gs.Clip(BOUND), every=1)
        return _compared(ours.steps(), theirs.steps(), 1e-4)


def _compared(ours: Tensor, theirs: Tensor, least: float) -> str:
    gap = (ours - theirs).abs().max().item()
    assert gap <= least, f"the weights differ by {gap:.1e}"
    return f"largest difference {gap:.0e}"


def step_times(device: torch.device, rounds: int = 20) -> str:
    """Steps with a clamp, over those with hooks by hand."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    names = {"hooks by hand": None, "gradsurg": 0, "effects every step": 1, "every 10": 10}

    def seconds(training: Training) -> float:
        wait()
        began = perf_counter()
        training.steps(10)
        wait()
        return perf_counter() - began

    with ExitStack() as stack:
        arms = {name: Training(device, stack, layers=20) for name in names}
        for name, every in names.items():
            if every is None:
                for param in arms[name].model.parameters():
                    param.register_hook(lambda grad: grad.clamp(-BOUND, BOUND))
            else:
                arms[name].attach(gs.Clip(BOUND), every=every)
        times = in_turns({name: partial(seconds, arms[name]) for name in arms}, rounds)
    middle = {name: median(own) for name, own in times.items()}
    base = middle.pop("hooks by hand")
    text = ", ".join(f"{name} {elapsed / base:.2f}" for name, elapsed in middle.items())
    is_fast = middle["gradsurg"] <= LIMIT * base or device.type != "cuda"
    assert is_fast, f"{text}, where gradsurg must be <= {LIMIT}"
    return text


CHECKS: dict[str, Check] = {
    "sums": sums_equal,
    "norms": norms_equal,
    "waiting": no_waiting,
    "clip": clip_as_torch,
    "amp": amp,
    "compile": compiled,
    "times": step_times,
}


def run(names: Sequence[str], device: torch.device) -> tuple[str, int]:
    """Return the table and the number of checks that failed."""
    rows, failed = [["check", "result", "seconds", "figures"]], 0
    for name in names:
        began = perf_counter()
        try:
            result, text = "passed", CHECKS[name](device)
        except Exception as error:  # a check may raise anything, and the others go on
            first = str(error).partition("\n")[0]
            result, text = "FAILED", f"{type(error).__name__}: {first}"
            failed += 1
        rows.append([name, result, f"{perf_counter() - began:.1f}", text])
    return aligned(rows), failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.checks if name not in CHECKS]:
        parser.error(f"CHECK must be one of {', '.join(CHECKS)}, found {', '.join(unknown)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("check_gpu: PyTorch finds no GPU for CUDA on this machine", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    table, failed = run(args.checks or list(CHECKS), device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, PyTorch {torch.__version__}\n{table}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
