"""Which run is which chain without a link, told from their configs alone."""

from typing import Any

import pytest

from gradsurg.report.compare import LeftOut, left_out, share


def config(*links: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    """The resolved config of a run, as far as it matters here. Any: what YAML can hold."""
    transform = {link: {"name": link.partition("_")[0], "value": 0.1} for link in links}
    return {"seed": seed, "transform": transform, "order": list(links), "sources": {}, **more}


def test_the_runs_without_a_link_are_found_seed_by_seed() -> None:
    configs = {
        f"{'+'.join(links) or 'none'}-{seed}": config(*links, seed=seed)
        for seed in (0, 1)
        for links in (("clip", "noise", "sign"), ("clip", "sign"), ("noise", "sign"), ("sign",))
    }
    del configs["noise+sign-1"]
    assert left_out(configs) == [
        LeftOut("clip+noise+sign-0", "clip", "noise+sign-0"),
        LeftOut("clip+noise+sign-0", "noise", "clip+sign-0"),
        LeftOut("clip+sign-0", "clip", "sign-0"),
        LeftOut("noise+sign-0", "noise", "sign-0"),
        LeftOut("clip+noise+sign-1", "noise", "clip+sign-1"),
        LeftOut("clip+sign-1", "clip", "sign-1"),
    ]


def test_another_number_another_order_and_a_control_are_no_chain_without_a_link() -> None:
    whole = {"whole": config("clip", "noise", "sign")}
    other = config("clip", "sign", site={"name": "outputs"})
    assert left_out(whole | {"other": other}) == []
    assert left_out(whole | {"other": config("sign", "clip")}) == []
    changed = config("clip", "sign")
    changed["transform"]["clip"]["value"] = 0.2
    assert left_out(whole | {"other": changed}) == []
    assert left_out({"control": {"seed": 0, "site": {}}, "one": config("clip")}) == []


def test_a_dotted_path_that_only_the_whole_has_is_in_the_way_of_nothing() -> None:
    whole = config("clip", "mine", sources={"mine.Halve": "0123"})
    found = left_out({"whole": whole, "clip": config("clip")})
    assert found == [LeftOut("whole", "mine", "clip")]
    edited = config("mine", sources={"mine.Halve": "4567"})
    assert left_out({"whole": whole, "mine": edited}) == []


def test_a_share_is_of_the_seeds_that_have_both() -> None:
    found = share([0.9, None, 0.8, 0.7], [0.8, 0.5, 0.6, None])
    assert found is not None
    assert (found.n, found.mean) == (2, pytest.approx(0.15))
    assert share([None], [1.0]) is None
