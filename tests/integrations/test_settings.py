"""A surgery in each training stack equals hooks by hand, as docs/trainers.md says."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.integrations.settings import SETTINGS, SITES, STACKS, difference

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not all(map(find_spec, ("transformers", "lightning", "accelerate"))),
        reason="needs the extra trainers",
    ),
]

FLOAT16 = "float16"
IN_THE_GATE = ("accumulation of 4", "`Parameters`, `step`")


def cases() -> Iterator[Any]:
    """Every combination; one of each stack is among the slow tests."""
    for stack in STACKS:
        for setting in SETTINGS:
            for site in SITES:
                mark = pytest.mark.slow if (setting, site) == IN_THE_GATE else pytest.mark.full
                yield pytest.param(stack, setting, site, marks=mark)


@pytest.mark.parametrize(("stack", "setting", "site"), list(cases()))
def test_no_setting_differs_from_hooks_by_hand(stack: str, setting: str, site: str) -> None:
    result = difference(stack, setting, site)
    assert result == ("refused" if setting.startswith(FLOAT16) and "step" not in site else 0)
