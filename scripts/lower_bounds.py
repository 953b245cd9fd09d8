"""Run the core tests with the lowest dependencies that pyproject.toml allows.

`python scripts/lower_bounds.py` needs uv (`pip install uv`), which makes an environment in which
every direct dependency has its lowest version. It takes minutes, and gigabytes of torch where there
is only a build for CUDA. Options are passed on to `uv run`: `--with torch==2.13.0`.
"""

import subprocess
import sys
from pathlib import Path

TESTS = "torch_internals hooks surgery effects sites contexts transforms triggers aggregators"
TESTS += " multitask per_example models tasks plugins experiment report"
UV = "uv run --isolated --no-project --resolution lowest-direct --with-editable .[test]"
# Deprecations are those of packages that are newer than the lowest ones.
PYTEST = "python -m pytest -n 2 -p no:cacheprovider -W ignore::DeprecationWarning"
PYTEST += " -W ignore::PendingDeprecationWarning"

if __name__ == "__main__":
    command = [*UV.split(), "-p", sys.executable, *sys.argv[1:], *PYTEST.split()]
    command += [f"tests/{name}" for name in TESTS.split()]
    sys.exit(subprocess.call(command, cwd=Path(__file__).parents[1]))
