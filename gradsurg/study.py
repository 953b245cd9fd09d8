"""Arms that are compared: run each of them once, seed by seed, and keep the record."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurg.effects import NUMBERS, EffectsState
from gradsurg.ledger import EntryState, SurgeryWarning
from gradsurg.live import Live
from gradsurg.sinks.base import Guarded, RunInfo, Sink, State
from gradsurg.store import EFFECTS, METRICS, RunDirectory, directory_name
from gradsurg.surgery import Surgery
from gradsurg.tasks.base import Data, Task
from gradsurg.train import Batches, outputs_of, train
from gradsurg.transforms.identity import Identity

ArmName = Literal["treated", "control"]

LEVELS = (0.5, 0.9, 0.99, 1.0)  # the quantiles that are told of gradients that nothing changed
NEARLY = 0.9  # of the largest: rounded to two digits it is still below it


@dataclass(frozen=True)
class Schedule:
    """How long a run is, how often it logs and is saved, in optimizer steps."""

    steps: int
    batch_size: int
    log_every: int
    checkpoint_every: int
    effects_every: int


@dataclass(frozen=True)
class Run:
    """One arm with one seed. `identity` is the resolved config that the run is recognised by."""

    study: str
    arm: ArmName
    label: str
    seed: int
    identity: dict[str, object]
    tags: tuple[str, ...]
    task: Task
    make_model: Callable[[Data], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer]
    surgery: Surgery
    shadow: bool
    schedule: Schedule
    device: torch.device

    def directory(self, out: Path) -> Path:
        """Where it lies: `<out>/<study>/<label>-<hash8>`."""
        return out / self.study / directory_name(f"{self.label}-seed{self.seed}", self.identity)


@dataclass
class Record:
    """Where a run lies, how it ended, and what its user should know."""

    run: Run
    directory: Path
    summary: dict[str, object]
    reused: bool = False


def execute(
    run: Run, out: Path, sinks: Sequence[Sink], force: bool = False, threads: int | None = None
) -> Record:
    """Do a run, or take up a finished or an interrupted one; nothing is left behind in the process.

    A finished run is not repeated unless `force`; an interrupted one goes on from its checkpoint
    and ends as if it had never been interrupted. A sink that raises is left out from then on.
    """
    place = RunDirectory(run.directory(out))
    if place.finished and not force:
        return Record(run, place.path, place.read_summary(), reused=True)
    with place.held():
        if force:
            place.clear()
        if place.finished:  # another process was at it
            return Record(run, place.path, place.read_summary(), reused=True)
        return Record(run, place.path, _execute(run, place, sinks, threads))


def _execute(
    run: Run, place: RunDirectory, sinks: Sequence[Sink], threads: int | None
) -> dict[str, object]:
    place.write_config(run.identity)
    info = RunInfo(
        run.study,
        run.arm,
        f"{run.label}-seed{run.seed}",
        run.seed,
        place.path,
        run.identity,
        run.tags,
        run.schedule.steps,
        resumed=place.resumable,
    )
    sinks = [sink if isinstance(sink, Guarded) else Guarded(sink) for sink in sinks]
    for sink in sinks:
        sink.start(info)
    state: State = "failed"
    summary: dict[str, object] = {}
    try:
        with _quarantine(threads, run.device):
            summary = _train(run, place, sinks)
        place.write_summary(summary)
        state = "diverged" if summary["state"] == "diverged" else "finished"
    finally:
        numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
        for sink in sinks:
            sink.finish(state, numbers)
    return summary


def _train(run: Run, place: RunDirectory, sinks: Sequence[Sink]) -> dict[str, object]:
    torch.manual_seed(run.seed)
    data = run.task.load()
    model = run.make_model(data).to(run.device)
    optimizer = run.make_optimizer(model)
    batches = Batches(
        data.train_inputs.to(run.device),
        data.train_targets.to(run.device),
        run.schedule.batch_size,
        run.seed,
    )
    # One of its own: that of the run has the state of whatever was executed with it before.
    surgery = Surgery(*run.surgery.interventions, seed=run.surgery.seed)
    kept = cast("Checkpoint | None", place.load_checkpoint())
    if kept is not None:
        _take_up(kept, run, model, optimizer, surgery)
    start = kept["step"] if kept is not None else 0
    said = kept["said"] if kept is not None else []
    log = _Log(run, place, sinks, seconds=[], done=start)
    log.again()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached = surgery.attach(
            model,
            optimizer,
            effects_every=run.schedule.effects_every,
            shadow=run.shadow,
            steps_per_epoch=len(data.train_inputs) // run.schedule.batch_size,
        )
        with attached as live:
            if kept is not None:
                live.ledger.resume(kept["ledger"])
                live.effects.resume(kept["effects"], live.ledger)
            for step in train(model, optimizer, run.task.loss, batches, run.schedule.steps, start):
                log.seconds.append(step.seconds)
                if step.done % run.schedule.log_every and step.done != run.schedule.steps:
                    continue
                if not log.interval(step.done, step.loss.item(), live):
                    break
                # Only here is nothing half-gathered, so the first log after a due step saves.
                if step.done % run.schedule.checkpoint_every < run.schedule.log_every:
                    place.save_checkpoint(
                        _checkpoint(
                            step.done,
                            model,
                            optimizer,
                            surgery,
                            live,
                            _said(said, caught),
                            run.device,
                        )
                    )
            notes = _changed_nothing(run, live)
    _pass_on(caught)
    return log.summary(data, model, notes + _said(said, caught))


def _said(before: Iterable[str], caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """What the surgery has warned of, each once."""
    new = [str(item.message) for item in caught if item.category is SurgeryWarning]
    return list(dict.fromkeys([*before, *new]))


def _pass_on(caught: Iterable[warnings.WarningMessage]) -> None:
    """Warn of what was caught and is not the surgery's: a warning of every step once."""
    told: dict[str | tuple[str, type[Warning], int], int] = {}
    for item in caught:
        if item.category is not SurgeryWarning:
            warnings.warn_explicit(
                item.message, item.category, item.filename, item.lineno, registry=told
            )


@dataclass
class _Log:
    """What a run writes down as it goes."""

    run: Run
    place: RunDirectory
    sinks: Sequence[Sink]
    seconds: list[float]
    loss: float = float("nan")
    done: int = 0
    diverged: bool = field(default=False)

    def interval(self, done: int, loss: float, live: Live) -> bool:
        """Log the interval that ends with step `done`; False if the loss is no longer finite."""
        self.done, self.loss = done, loss
        rows = live.effects.fetch()
        self.place.append_metrics({"step": done, "train/loss": loss})
        self.place.append_effects([{"step": done, **row} for row in rows])
        self._tell(done, loss, rows, {"time/step_ms": 1000 * median(self.seconds[-100:])})
        self.diverged = not isfinite(loss)
        return not self.diverged

    def again(self) -> None:
        """Tell the sinks what was logged before an interruption: to them this is a new run."""
        effects: dict[int, list[dict[str, Any]]] = {}
        for effect in self.place.read_rows(EFFECTS):
            effects.setdefault(effect["step"], []).append(effect)
        for row in self.place.read_rows(METRICS):
            self._tell(row["step"], row["train/loss"], effects.get(row["step"], []), {})

    def _tell(
        self, done: int, loss: float, rows: Sequence[Mapping[str, object]], times: dict[str, float]
    ) -> None:
        values = {"train/loss": loss, **times}
        for row in rows:
            prefix = f"effect/{row['transform']}/{row['site']}"
            for name in ("seen", "calls", *NUMBERS):
                value = row[name]
                if isinstance(value, int | float):
                    values[f"{prefix}/{name}"] = value
        for sink in self.sinks:
            sink.log(done, values)

    def times(self) -> dict[str, float | None]:
        """Median step times, apart for the steps whose effect was measured."""
        every = self.run.schedule.effects_every
        first = self.done - len(self.seconds)
        steps = list(enumerate(self.seconds, first))
        plain = [seconds for step, seconds in steps if not every or step % every]
        measured = [seconds for step, seconds in steps if every and step % every == 0]
        return {
            "time/step_ms": _median_ms(plain or measured),
            "time/measured_step_ms": _median_ms(measured),
        }

    def summary(self, data: Data, model: nn.Module, notes: list[str]) -> dict[str, object]:
        """The outcome, on all training and all test examples."""
        run = self.run
        outcome: dict[str, object] = {
            "state": "diverged" if self.diverged else "finished",
            "arm": run.arm,
            "label": run.label,
            "seed": run.seed,
            "steps": self.done,
        }
        parts = {
            "train": (data.train_inputs, data.train_targets),
            "test": (data.test_inputs, data.test_targets),
        }
        for part, (inputs, targets) in parts.items():
            outputs = outputs_of(model, inputs.to(run.device))
            for name, value in run.task.metrics(outputs, targets.to(run.device)).items():
                outcome[f"{part}/{name}"] = value
                if not isfinite(value):  # the last step can break what no loss has seen
                    outcome["state"] = "diverged"
        outcome |= self.times()
        outcome["effects_every"] = run.schedule.effects_every
        outcome["notes"] = notes
        return outcome


def _median_ms(seconds: list[float]) -> float | None:
    return 1000 * median(seconds) if seconds else None


class Checkpoint(TypedDict):
    """What a run goes on from."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]  # Any: torch says so
    surgery: dict[str, object]
    ledger: list[EntryState]
    effects: EffectsState
    said: list[str]
    rng: Tensor
    device_rng: Tensor | None


def _checkpoint(
    done: int,
    model: nn.Module,
    optimizer: Optimizer,
    surgery: Surgery,
    live: Live,
    said: list[str],
    device: torch.device,
) -> Checkpoint:
    return Checkpoint(
        step=done,
        model=model.state_dict(),
        optimizer=optimizer.state_dict(),
        surgery=surgery.state_dict(),
        ledger=live.ledger.state(),
        effects=live.effects.state(),
        said=said,
        rng=torch.get_rng_state(),
        device_rng=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    )


def _take_up(
    kept: Checkpoint, run: Run, model: nn.Module, optimizer: Optimizer, surgery: Surgery
) -> None:
    """Put model, optimizer, surgery and generators where the checkpoint has them."""
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    surgery.load_state_dict(_moved(kept["surgery"], run.device))
    torch.set_rng_state(kept["rng"])
    if kept["device_rng"] is not None:
        torch.cuda.set_rng_state(kept["device_rng"], run.device)


def _moved(surgery: dict[str, object], device: torch.device) -> dict[str, object]:
    """A surgery's state with its tensors on `device`: a checkpoint is read on the CPU."""
    states = cast(dict[str, dict[str, Tensor]], surgery["states"])
    moved = {
        site: {name: tensor.to(device) for name, tensor in state.items()}
        for site, state in states.items()
    }
    return surgery | {"states": moved}


@contextmanager
def _quarantine(threads: int | None, device: torch.device) -> Iterator[None]:
    """Give back the random generators and the number of threads as they were."""
    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _changed_nothing(run: Run, live: Live) -> list[str]:
    """Tell of each transform that changed no entry anywhere, and what would have."""
    if run.shadow:
        return []
    idle = _identities(run.surgery)
    rows = live.effects.rows()
    notes = []
    for transform in dict.fromkeys(str(row["transform"]) for row in rows):
        own = [row for row in rows if row["transform"] == transform]
        if transform in idle or any(row["changed"] for row in own):
            continue
        quantiles = live.effects.quantiles(transform, LEVELS)
        norms = [row["norm_before"] for row in own]
        norms = [norm for norm in norms if isinstance(norm, float) and isfinite(norm)]
        if not quantiles or not norms:
            continue
        shown = ", ".join(f"{q:.0%} {v:.2g}" for q, v in zip(LEVELS, quantiles, strict=True))
        reach = f"norms from {min(norms):.2g} to {max(norms):.2g}"
        notes.append(
            f"{transform} changed nothing. Quantiles of |g|: {shown}; {reach}. "
            + _would_bite(quantiles, norms)
        )
    return notes


def _identities(surgery: Surgery) -> set[str]:
    """The labels of what is meant to change nothing."""
    return {
        label
        for item, labels in zip(surgery.interventions, surgery.labels, strict=True)
        for label, link in zip(labels, item.links, strict=True)
        if isinstance(link, Identity)
    }


def _would_bite(quantiles: Sequence[float], norms: Sequence[float]) -> str:
    """Bounds that are surely below some entry and some norm, also once they are rounded."""
    largest, norm = quantiles[-1], max(norms)
    if not largest or not norm:
        return "The gradients were zero."
    usual = next(value for value in quantiles[1:] if value)
    entry_bound = min(usual, NEARLY * largest)
    norm_bound = min(median(norms) or norm, NEARLY * norm)
    return f"A bound of {entry_bound:.2g} on entries, or of {norm_bound:.2g} on norms, would bite."
