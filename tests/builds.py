"""Configs and experiments composed from overrides, without loggers and with one seed."""

import io
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gradsurg import run
from gradsurg.experiment import compose
from gradsurg.experiment.build import build
from gradsurg.experiment.runs import Experiment


def config(*words: str) -> dict[str, Any]:  # Any: what a YAML file can hold
    return compose.compose_config("logger=none", "seeds=1", *words)


def built(*words: str) -> Experiment:
    return build(config(*words))


def faults(line: str, config_dir: str | Path = "") -> list[str]:
    """Return the lines that `python -m gradsurg.run <line> dry_run=true` prints for its errors."""
    words = [*shlex.split(line), "dry_run=true"]
    words += [f"--config-dir={config_dir}"] if config_dir else []
    told = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(told), patch.object(sys, "argv", ["run"]):
        sys.argv += words
        try:
            run.main()
            code = 0
        except SystemExit as end:
            code = end.code
    lines = [text for text in told.getvalue().splitlines() if text[:9] != "warning: "]
    assert code == (2 if lines else 0)
    return lines
