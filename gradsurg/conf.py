"""The configs as a package, `pkg://gradsurg.conf`: in a checkout the folder conf/ beside gradsurg/.

A wheel has a folder gradsurg/conf/ too; Python then imports that folder instead of this module.
"""

from importlib.machinery import SourceFileLoader
from pathlib import Path

assert __spec__ is not None
# Hydra looks for a package in the folder of its loader, not in its `__path__`.
__file__ = str(Path(__file__).resolve().parents[1] / "conf" / "__init__.py")
__path__ = [str(Path(__file__).parent)]
__spec__.loader = SourceFileLoader(__name__, __file__)
__spec__.submodule_search_locations = __path__
