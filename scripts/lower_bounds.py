"""Run the core tests with the lowest dependencies that pyproject.toml allows.

`python scripts/lower_bounds.py` makes a virtual environment with uv (`pip install uv`), in which
every direct dependency has its lowest version, and runs the tests there. It takes minutes, and
gigabytes of torch where there is only a build for CUDA. `--torch 2.13.0` takes another torch. Not
part of the checks.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    *("torch_internals", "hooks", "surgery", "effects", "sites", "contexts", "transforms"),
    *("triggers", "aggregators", "multitask", "per_example", "models", "tasks", "plugins"),
    *("experiment", "report"),
)
# Of packages that are newer than the lowest ones; a deprecation is no fault.
IGNORED = ("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")


def main() -> int:
    """Return the exit code of the tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", default=[f"tests/{name}" for name in TESTS])
    parser.add_argument("--torch", help="the version of torch, instead of the lowest")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        subprocess.run(["uv", "venv", "-q", "-p", sys.executable, f"{folder}/venv"], check=True)
        install = ["uv", "pip", "install", "-q", "-p", python, "--resolution", "lowest-direct"]
        if options.torch:
            constraints = Path(folder, "constraints.txt")
            constraints.write_text(f"torch=={options.torch}\n", encoding="utf-8")
            install += ["-c", str(constraints)]
        subprocess.run([*install, "-e", ".[test]"], cwd=ROOT, check=True)
        subprocess.run(["uv", "pip", "list", "-p", python], check=True)
        ignored = [word for warning in IGNORED for word in ("-W", warning)]
        command = [python, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *ignored]
        command += options.tests
        return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
