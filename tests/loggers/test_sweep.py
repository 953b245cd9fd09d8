"""The W&B sweep in docs/sweeps.md: the commands that wandb's agent makes of it train a run."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gradsurg.experiment.build import build
from gradsurg.experiment.compose import compose_config
from tests.loggers.offline import alone, inspect, of_type
from tests.runs import ROOT


def sweep() -> dict[str, Any]:
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(method: .*?)```", text, re.DOTALL)
    return yaml.safe_load(block)


def commands(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[list[str]]:
    """The command lines of wandb's agent for the limits of all parameters."""
    from wandb import wandb_agent

    monkeypatch.chdir(folder)
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")  # the agent sets it
    started: list[list[str]] = []

    def process(command: list[str], **_: object) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace()

    monkeypatch.setattr(wandb_agent, "AgentProcess", process)
    config = sweep()
    agent: Any = object.__new__(wandb_agent.Agent)  # without an account
    agent._in_jupyter = agent._function = agent._forward_signals = None
    agent._run_processes = {}
    values = [
        spec.get("values") or [spec[key] for key in ("value", "min", "max") if key in spec]
        for spec in config["parameters"].values()
    ]
    for number, combination in enumerate(product(*values)):
        agent._sweep_command = list(config["command"])
        pairs = zip(config["parameters"], combination, strict=True)
        args = {key: {"value": value} for key, value in pairs}
        agent._command_run({"run_id": f"run{number}", "program": None, "args": args})
    return started


def test_commands_of_the_agent_compose_without_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = commands(monkeypatch, tmp_path)
    assert len(made) == 2 * 2 * 2
    assert {(*command[:3],) for command in made} == {("/usr/bin/env", "gradsurg", "run")}
    # The first has the first value of each parameter, the last the last one.
    _, config = [compose_config(*command[3:]) for command in (made[0], made[-1])]
    build(config)


@pytest.mark.full
def test_a_command_of_the_agent_logs_the_metric_of_the_sweep_to_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = commands(monkeypatch, tmp_path)[0][3:]
    variables = {"WANDB_SWEEP_ID": "sweep1", "WANDB_RUN_ID": "agents01", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-m", "gradsurg", "run", *words, "steps=20"],
        cwd=tmp_path,
        env={**os.environ, **alone(tmp_path), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "stopped" in done.stderr) == (0, False), done.stderr
    (path,) = tmp_path.rglob("offline-run-*")
    assert path.name.endswith("-agents01")
    updates = of_type(inspect(tmp_path, path), "summary")
    assert any(sweep()["metric"]["name"] in update["update"] for update in updates)
