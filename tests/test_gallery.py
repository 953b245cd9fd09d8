"""The gallery: its page is up to date, and each transform and aggregator has a small picture."""

import re

import gradsurg as gs
from docs import draw_gallery as gallery

MAX_BYTES, MAX_ALL = 20_000, 1_500_000


def test_the_page_is_up_to_date() -> None:
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.page(), (
        "python docs/draw_gallery.py writes it"
    )


def test_a_bar_in_a_text_ends_no_cell() -> None:
    rows = [line for line in gallery.page().splitlines() if line.startswith("| ")]
    assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != 3] == []


def test_each_transform_and_aggregator_has_a_small_picture_and_there_is_no_other() -> None:
    entries = [*gs.list("transform"), *gs.list("aggregator")]
    files = {path: path.stat().st_size for path in gallery.PICTURES.glob("*.png")}
    assert {gallery.picture(entry) for entry in entries} == set(files), (
        "python docs/draw_gallery.py draws the missing ones and removes the others"
    )
    assert max(files.values()) < MAX_BYTES
    assert sum(files.values()) < MAX_ALL
