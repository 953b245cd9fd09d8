"""W&B without an account or a network, and readers of its offline runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

from gradsurg.loggers.base import RunInfo
from tests.runs import ROOT

BIN = Path(sys.executable).parent


def info(directory, seed=0, label="clip [bold] seed 0"):
    return RunInfo(
        study="study",
        arm="clip",
        label=label,
        seed=seed,
        directory=Path(directory),
        config={"lr": 0.1, "model": {"hidden": [64, 64]}},
        tags=("clip", "mlp"),
        total_steps=100,
    )


SCRIPT = """
import json, os, signal, subprocess, sys
from pathlib import Path
from gradsurg.loggers.base import GuardedLogger, RunInfo
from gradsurg.loggers.wandb import Wandb

def run(seed):
    return RunInfo("study", "clip", f"clip {seed}", seed, Path("runs") / f"clip-{seed}",
                   {"lr": 0.1, "model": {"hidden": [64, 64]}}, ("clip", "mlp"), 100)

def kill_core():
    out = subprocess.run(["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid,cmd"],
                         capture_output=True, text=True).stdout
    (pid,) = [line.split()[0] for line in out.splitlines() if "wandb-core" in line]
    os.kill(int(pid), signal.SIGKILL)

"""


def alone(tmp_path):
    """Return an environment in which wandb finds no account, no settings and no server."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return env | {
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / "netrc"),
        "PYTHONPATH": str(ROOT),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "config"),
        "WANDB_DATA_DIR": str(tmp_path / "data"),
        # nothing may be reached, whatever goes wrong
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }


def run_wandb(tmp_path, code, mode=None):
    """Run SCRIPT and `code` in a new process, in `tmp_path`."""
    env = alone(tmp_path)
    if mode is not None:
        env["WANDB_MODE"] = mode
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + code],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def inspect(tmp_path, path):
    done = subprocess.run(
        [BIN / "wandb", "leet", "inspect", "--json", path],
        env=alone(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_type(records, kind):
    return [record[kind] for record in records if record["type"] == kind]


def rows(records):
    """Return the logged rows, without wandb's own numbers."""
    items = [history["item"] for history in of_type(records, "history")]
    return [{key: item[key] for key in item if not key.startswith("_")} for item in items]


def go(logger, directory="."):
    logger.start(info(directory))
    logger.log(10, {"train/loss": 1.0})
    logger.log(20, {"train/loss": 0.5})
    logger.finish("finished", {"test/accuracy": 0.9})
