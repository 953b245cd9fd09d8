"""A surgery in each training stack equals hooks by hand; the table of the docs is current."""

from importlib.util import find_spec

import pytest

from tests.integrations.settings import BEGIN, END, PAGE, SETTINGS, SITES, STACKS, difference, table

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not all(map(find_spec, ("transformers", "lightning", "accelerate"))),
        reason="needs the extra trainers",
    ),
]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("stack", STACKS)
def test_no_setting_differs_from_hooks_by_hand(stack: str, setting: str, site: str) -> None:
    result = difference(stack, setting, site)
    is_float16 = setting.startswith("float16")
    assert result == 0 or (is_float16 and result in ("n/a", "refused"))


def test_the_table_of_the_page_is_current() -> None:
    written = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert written.strip() == table()
