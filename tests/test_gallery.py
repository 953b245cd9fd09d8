"""The gallery: its page is up to date, and each transform and aggregator has a small picture."""

import re

import pytest

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


def test_a_picture_is_compared_with_its_file_and_with_one_of_unchanged_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = next(one for one in gs.list("transform") if one.name == "clip")
    assert gallery.is_up_to_date(entry)
    assert gallery.shows_effect(entry)
    monkeypatch.setitem(gallery.ILLUSTRATED, "clip", {"value": 9.0})
    assert not gallery.is_up_to_date(entry)
    assert not gallery.shows_effect(entry)


def test_only_pictures_without_an_effect_are_excepted() -> None:
    for entry in gs.list("transform"):
        if entry.name in gallery.UNSEEN:
            assert not gallery.differ(gallery.drawn(entry), gallery.drawn(entry, acts=False))
