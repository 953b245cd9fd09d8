"""Small studies on disk whose every number is made up by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradsurg.experiment.run_directory import RunDirectory
from gradsurg.experiment.run_identity import directory_name

SITES = ("first.weight", "last.weight")
STEPS = 40


def config(label: str, seed: int, **more: object) -> dict[str, object]:
    """A config as a run has it; a control has no transform, `clip+noise` has two links."""
    found: dict[str, object] = {"seed": seed, "steps": STEPS, "model": {"name": "mlp"}, **more}
    if label != "none" and "aggregator" not in more:
        links = label.split("+")
        found["transform"] = {
            link: {"name": link, "value": more.get("value", 0.01)} for link in links
        }
        found["order"] = links
    found.pop("value", None)
    return found


def paired(folder: Path, label: str, differences: Sequence[float], **more: object) -> Path:
    """Runs of the control with an accuracy of 0.5, and of an arm with these differences to it."""
    for seed, difference in enumerate(differences):
        control = whole(folder, "none", seed, 0.5, **more)
        whole(folder, label, seed, 0.5 + difference, control, **more)
    return folder


def plan(
    folder: Path, label: str, seed: int, control: str | None = None, **more: object
) -> RunDirectory:
    """A run that has not started; `arm` goes into its facts."""
    known = {key: more.pop(key) for key in ("arm",) if key in more}
    own = config(label, seed, **more)
    place = RunDirectory(folder / directory_name(f"{label}-seed{seed}", own))
    facts: dict[str, object] = {
        "study": folder.name,
        "arm": "control" if label == "none" else "treated",
        "label": label,
        "seed": seed,
        "tags": [label],
        "steps": STEPS,
        "control": control,
    }
    place.plan(facts | known, own)
    return place


def log(place: RunDirectory, label: str, steps: int = STEPS, loss: float = 1.0) -> None:
    """A line of metrics and one of effects for each site, every ten steps."""
    for step in range(10, steps + 1, 10):
        place.append("metrics.jsonl", [{"step": step, "train/loss": loss / step}])
        place.append("effects.jsonl", [effect(label, site, step) for site in SITES])


def effect(label: str, site: str, step: int, **more: object) -> dict[str, object]:
    numbers = {"cosine": 0.5, "changed": 0.25, "flipped": 0.0, "zeroed": 0.125, "distance": 0.5}
    counts = {"seen": 10, "calls": 10, "sampled": 1, "nonfinite": 0}
    norms = {"norm_before": 2.0, "norm_after": 1.0}
    return {"step": step, "transform": label, "site": site, **counts, **numbers, **norms, **more}


def conflict(
    aggregator: str, step: int, cosine: float | None = 0.5, count: int = 2, **more: object
) -> dict[str, object]:
    """A row of conflicts of that many tasks, each pair with that cosine; all norms are 1."""
    one = range(count)
    other = {"weights": [0.25] * count, "cosine": 0.75}
    return {
        "step": step,
        "aggregator": aggregator,
        "group": "shared",
        "tasks": [f"task{place}" for place in one],
        "norms": [1.0] * count,
        "cosines": [[1.0 if a == b else cosine for a in one] for b in one],
        "conflict_rate": float((cosine or 0) < 0),
        "norm_spread": 1.0,
        "condition": 3.0,
        "weights": [1.0] * count,
        "decrease": [0.5 + place for place in one],
        "cosine_to_mean": 1.0,
        "norm_to_mean": float(count),
        "weight_entropy": 1.0,
        "others": {"mgda": other, "mean": {**other, "cosine": 1.0}},
        **more,
    }


def clashing(folder: Path, count: int = 2, arms: tuple[str, ...] = ("pcgrad",)) -> Path:
    """Two seeds of aggregators and of the control, whose tasks conflict more and more."""
    shared = {"task": {"name": "overlay"}}
    controls: dict[int, str] = {}
    for label in ("none", *arms):
        for seed in range(2):
            mine = {} if label == "none" else {"aggregator": {"name": label}, "transform": {}}
            place = plan(folder, label, seed, controls.get(seed), **shared, **mine)
            for step in range(10, STEPS + 1, 10):
                place.append("metrics.jsonl", [{"step": step, "train/loss": 1 / step}])
                lost = [-0.25, *(0.5 + 0.1 * task for task in range(1, count))]
                more = {"decrease": lost} if label == "none" and step == STEPS else {}
                row = conflict(label, step - 10, 0.1 * seed + 0.25 - step / 100, count, **more)
                place.append("conflicts.jsonl", [row])
            end(place, label, 0.9 - seed / 10 if label == "none" else 0.95 - seed / 10)
            controls.setdefault(seed, place.path.name)
    return folder


def end(
    place: RunDirectory, label: str, accuracy: float, state: str = "finished", **more: object
) -> None:
    summary: Mapping[str, object] = {
        "state": state,
        "label": label,
        "steps": STEPS,
        "train/loss": 0.5,
        "test/accuracy": accuracy,
        "time/step_ms": 1.0 if label == "none" else 1.5,
        "time/measured_step_ms": 2.0,
        "effects_every": 10,
        "notes": [],
        **more,
    }
    place.write_summary(summary)


def whole(
    folder: Path, label: str, seed: int, accuracy: float, control: str | None = None, **more: object
) -> str:
    """A finished run; the name of its directory."""
    place = plan(folder, label, seed, control, **more)
    log(place, label)
    end(place, label, accuracy)
    return place.path.name


def chain(folder: Path) -> Path:
    """Two seeds of clip+noise, of each link alone and of the control."""
    outcomes = {
        "none": (0.9, 0.9),
        "clip+noise": (0.8, 0.7),
        "clip": (0.9, 0.84),
        "noise": (0.8, 0),
    }
    controls: dict[int, str] = {}
    for label, by_seed in outcomes.items():
        for seed, accuracy in enumerate(by_seed):
            place = plan(folder, label, seed, controls.get(seed))
            log(place, label)
            state = "finished" if accuracy else "diverged"
            end(place, label, accuracy, state)
            controls.setdefault(seed, place.path.name)  # the first are the plain ones
    return folder


def mixed(folder: Path) -> Path:
    """Three seeds of clip and control, and a run in each other state."""
    controls = [whole(folder, "none", seed, 0.9) for seed in range(3)]
    for seed, accuracy in enumerate((0.80, 0.84, 0.91)):
        whole(folder, "clip", seed, accuracy, controls[seed])
    for seed, accuracy in enumerate((0.7, 0.71)):
        whole(folder, "zero", seed, accuracy, controls[seed])
    broken = plan(folder, "zero", 2, controls[2])
    broken.append("metrics.jsonl", [{"step": 10, "train/loss": 2.0}])
    broken.append("metrics.jsonl", [{"step": 20, "train/loss": float("nan")}])
    end(broken, "zero", float("nan"), "diverged", steps=20)
    failed = plan(folder, "noise", 0, controls[0])
    failed.write_error("Traceback (most recent call last):\n  x\nValueError: <b>no</b> room\n")
    stopped = plan(folder, "noise", 1, controls[1])
    log(stopped, "noise", steps=20)
    plan(folder, "noise", 2, "none-seed9-00000000")
    return folder
