"""The ledger remembers calls and warns of sites without any."""

from gradsurg.effects.ledger import Ledger


def test_silent_sites_are_complained_about_in_one_sentence_an_intervention() -> None:
    ledger = Ledger()
    ledger.enter("clip", "a")
    ledger.enter("clip", "b", skipped="frozen")
    fired = ledger.enter("clip", "c")
    fired.fired = 1
    ledger.enter("zero", "a")
    ledger.enter("zero", "b", skipped="frozen")
    assert [*ledger.warnings("clip"), *ledger.warnings("zero")] == [
        # the table shows b: others of its intervention acted
        "clip: attached, but no gradient ever passed at: a",
        "zero: attached, but no gradient ever passed at: a; b (frozen)",
    ]
    assert "b  (frozen)" in ledger.table()


def test_the_table_has_a_line_for_each_site() -> None:
    ledger = Ledger()
    entry = ledger.enter("clip", "a", ["b"])
    entry.not_fired, entry.fired = 7, 5
    ledger.enter("clip", "c", skipped="frozen")
    head, rule, *rows = [line.split() for line in ledger.table().splitlines()]
    assert set(*rule) == {"-"}
    assert [head, *rows] == [
        ["intervention", "seen", "acted", "on", "site"],
        ["clip", "12", "5", "a", "=", "b"],
        ["clip", "0", "0", "c", "(frozen)"],
    ]


def interrupted() -> Ledger:
    """A ledger of two interventions: one acted at one of two sites, the other never."""
    ledger = Ledger()
    acted = ledger.enter("clip", "first.weight")
    acted.not_fired, acted.fired = 6, 4
    ledger.enter("clip", "first.bias")
    ledger.enter("zero", "last.weight", aliases=["tied.weight"]).not_fired = 10
    return ledger


def test_a_resumed_ledger_goes_on_counting() -> None:
    before, ledger = interrupted(), Ledger()
    held = ledger.enter("clip", "first.weight")
    expected = ledger.enter("clip", "was forgotten")
    ledger.resume(before.state())
    assert expected not in list(ledger)
    assert ledger.state() == before.state()
    assert [*ledger.warnings("clip")] == [*before.warnings("clip")] != []
    assert ledger.table() == before.table()
    held.fired += 1
    assert (ledger.state()[0]["calls"], ledger.state()[0]["fired"]) == (11, 5)


def test_resuming_leaves_the_counts_of_this_attachment_alone_and_forgets_none_that_acted() -> None:
    ledger = Ledger()
    entry = ledger.enter("clip", "first.weight")
    ledger.resume(interrupted().state())
    assert (entry.calls, entry.fired, entry.all_calls, entry.all_fired) == (0, 0, 10, 4)
    ledger.forget("zero", "last.weight")
    ledger.forget("clip", "first.bias")
    assert [entry.site for entry in ledger] == ["first.weight", "last.weight"]


def test_a_trigger_that_never_let_it_act_is_complained_about() -> None:
    ledger = Ledger()
    ledger.enter("clip", "a").not_fired = 3
    entry = ledger.enter("clip", "b")
    entry.not_fired = 4
    text = "clip: its trigger never fired in 7 gradients"
    assert [*ledger.warnings("clip")] == [text]
    assert [*ledger.warnings("clip", 3)] == [f"{text}; this block began at step 3"]
    entry.fired = 1
    assert [*ledger.warnings("clip")] == []
