"""Reproductions of papers, importable from a checkout: `gradsurg.experiments.chen2021.task`.

A paper's code and configs lie outside the package, in the checkout's `experiments/<paper>/`:
`task.py`, `model.py` and a Hydra tree `conf/`. A wheel has none of them.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# A wheel has its `conf` inside the package, and its parent is site-packages.
_IS_CHECKOUT = not (_PACKAGE / "conf").is_dir() and (_PACKAGE.parent / "experiments").is_dir()

ROOT = _PACKAGE.parent if _IS_CHECKOUT else None
"""The checkout; None if gradsurg was installed from a wheel."""

# With a `__path__` this module is a package, whose submodules are looked for in that folder.
# Their names are unique and found by `pickle` in any process that can import gradsurg.
__path__ = [str(ROOT / "experiments")] if ROOT else []
