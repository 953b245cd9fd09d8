"""A project with one experiment."""

from pathlib import Path

import pytest

from tests.reproduce.mini import LARGE, MINI, STUDY, expect


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with one experiment."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    for name in (STUDY, LARGE):
        (folder / f"{name}.yaml").touch()
    expect(tmp_path, MINI)
    return tmp_path
