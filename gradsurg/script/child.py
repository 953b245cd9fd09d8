"""The process of one run: it runs the script as `__main__`, and attaches a surgery to its model.

`python -m gradsurg.script.child FOLDER` reads `script.json` in the folder of the run, and writes
`numbers.jsonl`, `effects.jsonl` and at last `ended.json` there. The parent reads the output.
"""

import importlib.util
import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from gradsurg.core.surgery import Surgery
from gradsurg.effects.ledger import SurgeryWarning
from gradsurg.experiment.controls import control_interventions
from gradsurg.experiment.from_config import from_config
from gradsurg.experiment.idle import idle_notes
from gradsurg.experiment.logged_numbers import hardware
from gradsurg.experiment.run_directory import EFFECTS, RunDirectory
from gradsurg.script.recorder import Recorder, watch_libraries
from gradsurg.script.watcher import LIBRARIES, PACKAGE, AttachedModel, Refusal, Watcher, digest
from gradsurg.torch_internals import random_state

OWN = str(Path(__file__).parent)
SPEC, ENDED = "script.json", "ended.json"
WRITE_EVERY = 50
"""Steps between two writes of the effects on gradients."""
FIRST_STEPS = 3
"""Steps that are not timed: the first ones allocate memory or compile."""


class DryRunEnd(SystemExit):
    """The first step of a dry run is done."""


@dataclass
class Script:
    """One run of a script: its settings (`spec`) and its result."""

    folder: Path
    spec: Mapping[str, Any]  # Any: JSON
    warned: list[str] = field(default_factory=list)
    seeded: str = ""  # the first call by which the script seeds itself
    plan: str = ""
    times: list[float] = field(default_factory=list)
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.directory = RunDirectory(self.folder)
        self.recorder = Recorder(self.folder)
        self.surgery = self._surgery()
        self.watcher = Watcher(
            self._surgery,
            self.spec["model"],
            self.spec["effects_every"],
            self._on_attach,
            self._on_step,
            self._write_effects,
        )
        self._process, self._began, self._last = os.getpid(), perf_counter(), 0.0

    def run(self) -> int:
        """Run the script to its end; return the exit code."""
        end_libraries = watch_libraries(self.recorder)
        self._watch_warnings()
        self._watch_exits()
        main, code = _main_module(self.spec)
        random_state.seed(self.spec["seed"])
        self._watch_seeding()
        exit_code, error, refused = 0, "", ""
        try:
            exec(code, main.__dict__)
        except DryRunEnd:
            pass
        except Refusal as fault:
            refused, exit_code = str(fault), 2
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException as fault:  # the script may raise anything
            exit_code, error = 1, _traceback(fault, (*LIBRARIES, PACKAGE, "<frozen"))
            print(_traceback(fault, (OWN,)), end="", file=sys.stderr)
        end_libraries()
        self.end(exit_code, error, refused)
        return exit_code

    def end(self, code: int, error: str = "", refused: str = "") -> None:
        """Detach the surgery, and write the result of the run."""
        if self.has_ended or os.getpid() != self._process:
            return
        self.has_ended = True
        watcher, steps = self.watcher, self.watcher.step
        notes, idle = dict.fromkeys(self.warned, ""), [True]
        nonfinite, weights = None, ""
        for each in watcher.attached:
            nonfinite = nonfinite or each.live.effects.first_nonfinite
            self._write_effects(each)
            if self.spec["surgery"] is not None:
                told, is_idle = idle_notes(each.surgery, each.live, self.spec["effects_every"])
                notes |= told
                idle.append(is_idle)
            weights = digest(each.model.parameters())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", SurgeryWarning)
                each.live.abort() if error or refused else each.live.close()
            notes |= {str(item.message): "" for item in caught}
        content = {
            "code": code,
            "error": error,
            "refused": refused,
            "unattached": watcher.why_not(),
            "steps": steps,
            "seeded": self.seeded,
            "found": watcher.notes,
            "plan": self.plan,
            "begin": watcher.attached[0].begin if watcher.attached else "",
            "weights": weights,
            "nonfinite": nonfinite,
            "idle": self.spec["surgery"] is not None and len(idle) > 1 and all(idle),
            "notes": notes,
            "step_ms": 1000 * median(timed) if (timed := self.times[FIRST_STEPS:]) else None,
            "train_s": perf_counter() - self._began,
            "hardware": hardware(_device(watcher.attached[-1].model if watcher.attached else None)),
        }
        self.directory.write_json(ENDED, content)

    def _surgery(self) -> Surgery:
        """Return a new surgery of the arm; the plain control's is empty."""
        if self.spec["surgery"] is None:
            return Surgery()
        surgery = from_config(self.spec["surgery"], seed=self.spec["seed"], own_code=True)
        if (kind := self.spec["control"]) is None:
            return surgery
        items = control_interventions(surgery.interventions, kind)
        return Surgery(*items, seed=surgery.seed)

    def _on_attach(self, model: nn.Module, example: object) -> None:
        if self.spec["dry_run"]:
            self.plan = self.surgery.plan(model, example)

    def _on_step(self, attachment: AttachedModel) -> None:
        step, now = attachment.step, perf_counter()
        if self._last:
            self.times.append(now - self._last)
        self._last = now
        self.recorder.end_step(step)
        if step % WRITE_EVERY == 0:
            self._write_effects(attachment)
        if self.spec["dry_run"]:
            raise DryRunEnd

    def _write_effects(self, attachment: AttachedModel) -> None:
        rows = attachment.live.effects.fetch()
        if rows:
            step = attachment.step
            self.directory.append(EFFECTS, [{"step": step, **row} for row in rows])

    def _watch_warnings(self) -> None:
        """Keep the warnings of gradsurg, which are printed too."""
        show = warnings.showwarning

        def keep(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
            if category is SurgeryWarning:
                self.warned.append(str(message))
            show(message, category, *args, **kwargs)

        warnings.showwarning = keep

    def _watch_exits(self) -> None:
        """Write the result before `os._exit` too, which runs no `finally`."""
        leave = os._exit

        def end_and_leave(code: int) -> Any:
            self.end(code)
            leave(code)

        os._exit = end_and_leave

    def _watch_seeding(self) -> None:
        """Note the first call of `torch.manual_seed`, by the script or by a library."""
        seed = torch.manual_seed

        def manual_seed(number: Any) -> torch.Generator:
            if not self.seeded and os.getpid() == self._process:
                self.seeded = f"torch.manual_seed({int(number)})"
            return seed(number)

        torch.manual_seed = manual_seed


def _main_module(spec: Mapping[str, Any]) -> tuple[ModuleType, CodeType]:
    """Make the module `__main__` of the script, which stays after its end: pickles, processes that
    are spawned and functions that are called at exit need it.
    """
    main = ModuleType("__main__")
    name, words = spec["script"], spec["words"]
    if spec["module"]:
        sys.path[0] = os.getcwd()
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
        loader: Any = found and found.loader
        code = loader.get_code(found.name) if found and loader else None
        if found is None or code is None:
            raise Refusal(f"-m {name}: there is no such module")
        main.__spec__, main.__package__, main.__file__ = found, found.parent, found.origin
        main.__loader__ = loader
        name = found.origin or name
    else:
        path = Path(name)
        code = compile(path.read_bytes(), name, "exec")
        main.__file__ = name
        sys.path[0] = str(path.resolve().parent)
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"], sys.argv = main, [name, *words]
    return main, code


def _traceback(fault: BaseException, others: tuple[str, ...]) -> str:
    """Return the traceback of an error of the script without the frames of files in `others`."""
    trace = traceback.TracebackException.from_exception(fault)
    waiting = [trace]
    while waiting:
        one = waiting.pop()
        frames = [frame for frame in one.stack if not frame.filename.startswith(others)]
        one.stack = traceback.StackSummary.from_list(frames)
        waiting += [each for each in (one.__cause__, one.__context__) if each is not None]
    return "".join(trace.format())


def _device(model: nn.Module | None) -> torch.device:
    params = iter(()) if model is None else model.parameters()
    return next((param.device for param in params), torch.device("cpu"))


def main() -> int:
    """Run the script that the folder in the first argument describes."""
    folder = Path(sys.argv[1])
    spec = json.loads((folder / SPEC).read_text(encoding="utf-8"))
    if spec["ranks"] > 1 and os.environ["RANK"] != "0":  # the files of the run are those of rank 0
        folder /= f"rank{os.environ['RANK']}"
        folder.mkdir(exist_ok=True)
    return Script(folder, spec).run()


if __name__ == "__main__":
    sys.exit(main())
