"""What one config describes, object by object; what cannot be made is a fault of its key."""

import json
from collections.abc import Mapping

import torch
from torch import nn

from gradsurg.aggregators.base import Aggregator
from gradsurg.config.faults import Faults
from gradsurg.config.make import ERRORS, Config, called, fields_of, make, named, sentence, theirs
from gradsurg.loggers.base import Guarded, Logger
from gradsurg.plugins.registry import find, names, snake
from gradsurg.tasks.base import Data, MultiTask, Task
from gradsurg.torch_internals import random_state
from gradsurg.transforms.base import Transform
from gradsurg.transforms.chain import Chain


def transforms_of(config: Config, faults: Faults) -> dict[str, Transform]:
    """The transforms by their keys, in their order."""
    made = {}
    for key, fields in (config.get("transform") or {}).items():
        with faults.at(f"transform.{key}"):
            made[key] = make("transforms", fields, Transform)
    return made


def aggregator_of(config: Config, faults: Faults) -> Aggregator | None:
    """The aggregator, None if none was asked for."""
    fields = config.get("aggregator") or None
    if fields is None:
        return None
    return faults.made("aggregator", lambda: make("aggregators", fields, Aggregator))


def several_losses() -> list[str]:
    """The tasks of gradsurg's own that have several losses."""
    return [stem for stem in names("tasks") if issubclass(find("tasks", stem), MultiTask)]


def names_of(transforms: Mapping[str, Transform]) -> tuple[str, ...]:
    """A name for each link that the transforms make together: a chain among them has several."""
    return tuple(
        f"{key}.{snake(type(link).__name__)}" if isinstance(transform, Chain) else key
        for key, transform in transforms.items()
        for link in (transform.links if isinstance(transform, Chain) else (transform,))
    )


def loggers_of(config: Config, faults: Faults) -> tuple[Guarded, ...]:
    """The loggers, each guarded."""
    made = []
    for key, fields in (config.get("logger") or {}).items():
        with faults.at(f"logger.{key}"):
            made.append(Guarded(make("loggers", fields, Logger), json.dumps([key, fields])))
    return tuple(made)


def task_of(config: Config, faults: Faults) -> tuple[Task | None, Data | None]:
    """The task and its data."""
    task = faults.made("task", lambda: make("tasks", config["task"], Task))
    if task is None:
        return None, None
    with faults.at("task"):
        with theirs(config["task"], "load"):
            data = task.load()
        if not isinstance(data, Data):
            raise TypeError(f"load() must give a gradsurg.tasks.base.Data, found {data!r}")
        return task, data
    return task, None


def content_of(config: Config, task: Task) -> str:
    """What stands for the files that the task reads."""
    with theirs(config["task"], "files"):
        return task.content


def model_of(config: Config, data: Data) -> nn.Module:
    """A model for the data, its weights drawn from the global generator."""
    fields = config["model"]
    made = named("models", fields)
    options = data.model_options(made, fields_of(fields))
    with theirs(fields):
        model = called(made, (data.input_shape, data.num_outputs), options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"must make a torch.nn.Module, found {model!r}")
    return model


def checked_model(config: Config, task: Task, data: Data) -> nn.Module:
    """The model once over, two examples through it, without a trace in the global generators."""
    with random_state.kept():
        model = model_of(config, data)
        try:
            task.loss(model(data.train_inputs[:2]), data.train_targets[:2]).backward()
        except ERRORS as error:
            shape = list(data.train_inputs[:2].shape)
            raise ValueError(
                f"inputs {shape} do not pass through it and the task's loss: "
                f"{type(error).__name__}: {sentence(error)}"
            ) from error
        return model


def device_of(name: str) -> torch.device:
    """The device, once something has been put on it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a wait, before anything is trained
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"there is no '{name}' here; auto takes what there is") from None
    return device
