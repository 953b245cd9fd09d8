"""The words of all sentences of a report, on one page."""

from tests.report.sentences import FILE, page


def test_the_sentences_are_those_on_the_page() -> None:
    """After a change of the words: `python -m tests.report.sentences`, and read the difference."""
    assert page().splitlines() == FILE.read_text(encoding="utf-8").splitlines()
