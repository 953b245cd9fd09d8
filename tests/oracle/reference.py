"""The two trees that the oracle compares: the working tree, and the reference from git history."""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REFERENCE = "4f89e01c44b0baf46c3b6b8898827ae2753d887c"
"""The commit that the working tree must agree with."""

WORKING_TREE = Path(__file__).resolve().parents[2]


def unpack() -> Path:
    """Return the folder with the files of the reference; unpacked once, into the user's cache.

    Without its `tests`, so that a process of the reference finds those of the working tree.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradsurg-oracle"
    folder = cache / REFERENCE
    if folder.is_dir():
        return folder
    archive = subprocess.run(
        ["git", "archive", REFERENCE], cwd=WORKING_TREE, capture_output=True, check=False
    )
    if archive.returncode != 0:
        reason = archive.stderr.decode().strip()
        raise SystemExit(f"the reference {REFERENCE} is not in this repository: {reason}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        unpacked = Path(temporary) / "tree"
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            members = [file for file in files if file.name.split("/")[0] != "tests"]
            files.extractall(unpacked, members, filter="data")
        try:
            unpacked.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def environment(tree: Path) -> dict[str, str]:
    """The environment of a process with `tree`'s gradsurg and the working tree's `tests`."""
    paths = os.pathsep.join(map(str, dict.fromkeys((tree, WORKING_TREE))))
    return {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


def assert_imported_from(tree: Path) -> None:
    """Raise RuntimeError unless this process imports gradsurg from `tree`."""
    import gradsurg

    file = Path(str(gradsurg.__file__)).resolve()
    if not file.is_relative_to(tree.resolve()):
        raise RuntimeError(f"gradsurg: must be imported from {tree}, found {file}")


def start(module: str, tree: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `python -m tests.oracle.<module> <tree> <arguments>` with `tree`'s gradsurg.

    The module calls `assert_imported_from(tree)` before anything else.
    """
    command = [sys.executable, "-m", f"tests.oracle.{module}", str(tree), *arguments]
    return subprocess.Popen(command, env=environment(tree))
