"""The size and the wording of the code stay within the bounds that were reached."""

import pytest

from tests import house


@pytest.mark.parametrize(
    ("stage", "functions", "files"),
    [("attach", 60, 20), ("first step", 27, 9), ("later step", 13, 8)],
)
def test_few_functions_run_to_attach_a_clip_and_to_step(
    stage: str, functions: int, files: int
) -> None:
    calls = {
        call for call in house.life_of_a_clip()[stage] if not call[0].startswith("core/pitfalls")
    }
    assert 0 < len(calls) <= functions, sorted(calls)
    assert len({file for file, _ in calls}) <= files


def test_few_docstrings_are_built_around_what_and_few_modules_have_a_single_importer() -> None:
    figures = house.figures()
    assert float(str(figures["docstrings with a 'what'"]).rstrip("%")) <= 3
    assert figures["root modules"] == 7
    assert int(str(figures["modules with a single importer"])) <= 28
    assert int(str(figures["files outside the plug-ins"])) <= 198


def test_no_room_has_more_lines_than_its_budget() -> None:
    over = {room: (lines, most) for room, lines, most in house.budget() if lines > most}
    assert over == {}, "lines and limits of rooms: see ROOMS in tests/house.py"


def test_the_lines_of_pages_count_and_those_of_yaml_files_do_not(tmp_path) -> None:
    (tmp_path / "conf").mkdir()
    for name in ("one.py", "page.html", "two.yaml", "conf/three.py"):
        (tmp_path / name).write_text("1\n2\n", encoding="utf-8")
    assert house.lines_below(tmp_path) == 4


def test_a_docstring_around_what_is_counted(tmp_path) -> None:
    (tmp_path / "one.py").write_text(
        '"""What passes."""\ndef f():\n    """Return a sum."""\n', encoding="utf-8"
    )
    assert house.what_share(house.trees(tmp_path)) == 0.5
