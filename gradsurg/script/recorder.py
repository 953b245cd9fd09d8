"""Numbers of a script that runs under `python -m gradsurg.script`, written as they arrive.

In the process of the script: `outcome`, which the script may call, and patches of W&B, TensorBoard,
Lightning and transformers, each made when the script has imported the library.
"""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

NUMBERS = "numbers.jsonl"
"""The file in the folder of a run: a line for each call that reported numbers."""
OUTPUT = "output"
"""Key of a line that has the length of the output at the end of a step."""

_recorder: "Recorder | None" = None


def outcome(**numbers: float) -> None:
    """Report outcomes of a script that was started by `python -m gradsurg.script`.

    `gradsurg.outcome(accuracy=0.93)`: the verdict is about the first name that was reported, with
    its last value, unless `metric=` names another. Without that command this does nothing.
    """
    if _recorder is not None:
        _recorder.add("outcome", numbers)


class Recorder:
    """Writes numbers to a file, a line for each call, with the step in which they came.

    A process that the script forks, for example a DataLoader worker, writes nothing.
    """

    def __init__(self, folder: Path) -> None:
        global _recorder
        self._file = (folder / NUMBERS).open("a", encoding="utf-8")
        self._process = os.getpid()
        self._length = 0
        self.step = 0
        _recorder = self

    def add(self, source: str, numbers: Mapping[str, object]) -> None:
        """Write those of `numbers` that are numbers: also tensors and arrays with one entry."""
        known = {
            str(key): value for key, one in numbers.items() if (value := _number(one)) is not None
        }
        if known:
            self._write({"source": source, "step": self.step, "numbers": known})

    def end_step(self, step: int) -> None:
        """Count a step of the optimizer; note the length of the output, if it has grown, with the
        number of steps when that was printed.
        """
        before, self.step = self.step, step
        try:
            length = os.fstat(1).st_size
        except OSError:  # the script has closed it
            return
        if length != self._length:
            self._length = length
            self._write({OUTPUT: length, "step": before})

    def _write(self, row: Mapping[str, object]) -> None:
        if os.getpid() == self._process:
            self._file.write(f"{json.dumps(row)}\n")
            self._file.flush()


def watch_libraries(recorder: Recorder) -> Callable[[], None]:
    """Record what the script logs by libraries that it will import.

    Return a function to call at the end: it reads the summary of a W&B run that is still open.
    """
    import sys

    def add_summary(run: Any) -> None:  # Any: of W&B
        items = dict(run.summary).items()
        recorder.add("W&B", {key: value for key, value in items if not key.startswith("_")})

    def wandb(module: ModuleType) -> None:
        run = module.sdk.wandb_run.Run  # `wandb.log` is replaced by `init`: the class is patched
        _extend(run, "log", before=lambda self, data, *_, **__: recorder.add("W&B", data))
        _extend(run, "finish", before=lambda self, *_, **__: add_summary(self))

    def tensorboard(module: ModuleType) -> None:
        def add(self: object, tag: str, value: object, *_: object, **__: object) -> None:
            recorder.add("TensorBoard", {tag: value})

        _extend(module.SummaryWriter, "add_scalar", before=add)

    def trainer(module: ModuleType) -> None:
        _extend(
            module.Trainer, "log", before=lambda self, logs, *_, **__: recorder.add("Trainer", logs)
        )

    def lightning(module: ModuleType) -> None:
        for name in ("fit", "validate", "test"):
            _extend(
                module.Trainer,
                name,
                after=lambda self: recorder.add("Lightning", self.callback_metrics),
            )

    actions = {
        "wandb": wandb,
        "torch.utils.tensorboard.writer": tensorboard,
        "transformers.trainer": trainer,
        "lightning.pytorch.trainer.trainer": lightning,
        "pytorch_lightning.trainer.trainer": lightning,
    }
    for name in [name for name in actions if name in sys.modules]:
        actions.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _AfterImport(actions))

    def end() -> None:
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is not None:
            add_summary(run)

    return end


class _AfterImport(MetaPathFinder):
    """Calls a function with a module after the script has imported it; imports none by itself."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        act = self._actions.pop(name, None)
        if act is None:
            return None
        spec = importlib.util.find_spec(name)  # not by this finder: its action is popped
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            act(module)

        spec.loader.exec_module = exec_module
        return spec


def _extend(
    cls: Any,  # Any: a class of another library
    name: str,
    before: Callable[..., None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> None:
    """Replace a method by one that also calls `before` with its arguments, and `after(self)`."""
    plain = getattr(cls, name)

    @wraps(plain)
    def method(self: object, *args: object, **kwargs: object) -> object:
        if before is not None:
            before(self, *args, **kwargs)
        result = plain(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    setattr(cls, name, method)


def _number(value: Any) -> float | None:  # Any: what a script logs
    """Return a number, also from a tensor or an array with one entry; None for anything else."""
    if isinstance(value, bool | str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor with several entries
        return None
