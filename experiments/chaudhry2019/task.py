"""Permuted MNIST: a sequence of tasks with the same digits and permuted pixels, and a memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Generator, Tensor
from torch.nn import functional

from gradsurg.plugins.fields import FieldError, validated
from gradsurg.tasks.base import Chance, Data, MultiTask, Order, by_name, floats
from gradsurg.tasks.data.arrays import Count, Seed
from gradsurg.tasks.data.images import NUM_CLASSES, Images, image_files, read_images
from gradsurg.tasks.mnist import LAYOUT

LABEL, TASK, KEPT = range(3)  # columns of the targets; KEPT is 1 for examples of the memory
NAMES = ("now", "memory")


@validated
class PermutedMNIST(MultiTask):
    """Learn `num_tasks` tasks one after another, without forgetting those before (Goodfellow et
    al. 2014, arXiv 1312.6211; set-up after Chaudhry et al. 2019, arXiv 1812.00420).

    Each task is to classify MNIST's digits, with pixels from 0 to 1 in a random order that differs
    between tasks. A task has `num_train` training images of its own, and all tasks have the same
    `num_test` test images; null means all. `data_seed` chooses the images and the orders. An epoch
    is one pass over one task; later epochs repeat the last task. All tasks share ten outputs.

    The first `per_class` examples of each class of a task go into a memory. A batch has examples of
    the current task and up to `memory_batch` from the memory of the tasks before. Their losses are
    `now` and `memory`; the latter is 0 in the first task, and always with `per_class` 0. A test
    covers all tasks: `accuracy_<task>` (from 0), and their mean.

    `test/forgetting` is a mean over all learned tasks except the last. For each it is the best
    accuracy in a test since the task's end, minus the final accuracy. It requires a test at the end
    of each task, such as with `eval_every` equal to the steps of a task.
    """

    root: str | None = None
    num_tasks: Count = 10
    num_train: Count | None = 10000
    num_test: Count | None = 2000
    per_class: Annotated[int, Field(ge=0)] = 25
    memory_batch: Count = 256
    data_seed: Seed = 0
    verify: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES

    def files(self) -> Sequence[Path]:
        # verified files have a fixed content
        return () if self.verify else image_files(LAYOUT, self.root)

    def load(self) -> Data:
        found = read_images(LAYOUT, self.root, self.verify, self.content)
        self._check(found)
        train, labels = _flat(found.train_images), found.train_labels
        num_train = self.num_train or len(labels)
        test = np.random.default_rng([self.data_seed, 0]).permutation(len(found.test_labels))
        test = test[: self.num_test]
        parts: dict[str, list[np.ndarray]] = {"now": [], "memory": [], "test": []}
        targets: dict[str, list[np.ndarray]] = {name: [] for name in parts}
        for task in range(self.num_tasks):
            generator = np.random.default_rng([self.data_seed, 1 + task])
            pixels = generator.permutation(train.shape[1])
            own = generator.permutation(len(labels))[:num_train]
            chosen = {"now": own, "memory": own[_first(labels[own], self.per_class)], "test": test}
            for name, numbers in chosen.items():
                source = (found.test_labels, _flat(found.test_images))
                its_labels, images = source if name == "test" else (labels, train)
                parts[name].append(images[numbers][:, pixels])
                targets[name].append(_marked(its_labels[numbers], task, name == "memory"))
        kept = [len(part) for part in parts["memory"]]
        return Data(
            train_inputs=_scaled(parts["now"] + parts["memory"]),
            train_targets=torch.from_numpy(np.concatenate(targets["now"] + targets["memory"])),
            test_inputs=_scaled(parts["test"]),
            test_targets=torch.from_numpy(np.concatenate(targets["test"])),
            input_shape=(train.shape[1],),
            num_outputs=NUM_CLASSES,
            order=OneByOne(self.num_tasks, num_train, tuple(kept), self.memory_batch),
        )

    def losses(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        # A branch or a selection of rows would wait for the device.
        each = functional.cross_entropy(outputs, targets[:, LABEL], reduction="none")
        kept = targets[:, KEPT].to(each)
        return {
            name: (each * own).sum() / own.sum().clamp(min=1)
            for name, own in zip(NAMES, (1 - kept, kept), strict=True)
        }

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        now = targets[:, KEPT] == 0
        names = NAMES if not now.all() else NAMES[:1]
        found = self.losses(outputs, targets)
        losses = floats(found[name] for name in names)
        tasks = targets[now, TASK]
        right = (outputs[now].argmax(dim=1) == targets[now, LABEL]).double()
        counts = torch.bincount(tasks, minlength=self.num_tasks)
        accuracies = (torch.bincount(tasks, right, minlength=self.num_tasks) / counts).tolist()
        return {
            "loss": sum(losses),
            "accuracy": fmean(accuracies),
            **by_name("loss", names, losses),
            **by_name("accuracy", self._numbers, accuracies),
        }

    def chance(self, targets: Tensor) -> Chance:
        kept = targets[:, KEPT] > 0
        parts = [_shares(targets[own, LABEL]) for own in (~kept, kept) if own.any()]
        # Waits for the device, once a run.
        entropy = sum(-(shares * shares.log()).sum().item() for shares in parts)
        description = f"chance for {len(parts[0])} classes is"
        return Chance(entropy, "accuracy", parts[0].max().item(), 1.0, description)

    @property
    def trajectory_metric_names(self) -> tuple[str, ...]:
        return ("forgetting",) if self.num_tasks > 1 else ()

    def trajectory_metrics(
        self, rows: Sequence[Mapping[str, Any]], epoch: int
    ) -> dict[str, float]:  # Any: what JSON can hold
        end = max((row["step"] for row in rows), default=0)
        learned = min(-(-end // epoch), self.num_tasks)  # the last one may be incomplete
        lost = []
        for task, number in enumerate(self._numbers[: learned - 1], 1):
            tests = {row["step"]: row.get(f"test/accuracy_{number}") for row in rows}
            since = [value for step, value in tests.items() if task * epoch <= step < end]
            known = [value for value in since if value is not None]
            if tests.get(task * epoch) is None or tests[end] is None:
                return {}
            lost.append(max(known) - tests[end])
        return {"forgetting": fmean(lost)} if lost else {}

    @property
    def _numbers(self) -> list[str]:
        return [str(task) for task in range(self.num_tasks)]

    def _check(self, found: Images) -> None:
        for field, there in (("num_train", found.train_labels), ("num_test", found.test_labels)):
            asked = getattr(self, field)
            if asked is not None and asked > len(there):
                rule = f"must be <= {len(there)} examples, found {asked}"
                raise FieldError("task", [(field, rule)])


@dataclass(frozen=True)
class OneByOne(Order):
    """One task after the other, each with the memory of those before.

    `kept` has the number of examples in the memory of each task. In the data, all tasks come
    first, then the memory, both in the order of the tasks.
    """

    num_tasks: int
    per_task: int
    kept: tuple[int, ...]
    memory_batch: int

    @property
    def num_examples(self) -> int:
        return self.per_task

    def batches(self, epoch: int, size: int, generator: Generator) -> Iterator[Tensor]:
        task = min(epoch, self.num_tasks - 1)
        own = torch.randperm(self.per_task, generator=generator) + task * self.per_task
        first, there = self.num_tasks * self.per_task, sum(self.kept[:task])
        for now in own.split(size):
            memory = torch.randperm(there, generator=generator)[: self.memory_batch]
            yield torch.cat([now, first + memory])


def _first(labels: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the first `count` examples of each class."""
    places = [np.flatnonzero(labels == label)[:count] for label in range(NUM_CLASSES)]
    return np.sort(np.concatenate(places))


def _marked(labels: np.ndarray, task: int, kept: bool) -> np.ndarray:
    """Return targets (examples, 3)."""
    columns = [labels.astype(np.int64), np.full(len(labels), task), np.full(len(labels), kept)]
    return np.stack(columns, axis=1).astype(np.int64)


def _flat(images: np.ndarray) -> np.ndarray:
    return images.reshape(len(images), -1)


def _scaled(parts: Sequence[np.ndarray]) -> Tensor:
    """Convert bytes to numbers from 0 to 1."""
    return torch.from_numpy(np.concatenate(parts)).float().div_(255)


def _shares(labels: Tensor) -> Tensor:
    _, counts = labels.unique(return_counts=True)
    return counts.double() / labels.numel()
