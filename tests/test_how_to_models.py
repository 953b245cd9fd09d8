"""The pages of docs/how/ about transformers, TRL and FSDP2 run as they stand."""

from pathlib import Path

import pytest

from tests.forks import Ranks, in_ranks
from tests.test_how_to import outcomes, stripped

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of transformers and TRL
    pytest.mark.filterwarnings("error::gradsurg.effects.ledger.SurgeryWarning"),
]


def run(stem: str, capsys: pytest.CaptureFixture[str] | None = None) -> None:
    """Run the blocks of a page; compare the printed text that it shows."""
    for shown in outcomes(stem):
        printed = "" if capsys is None else capsys.readouterr().out  # a Trainer prints its logs
        assert shown is None or stripped(printed) == stripped(shown)


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["huggingface", "attnlrp"])
def test_a_page_about_a_model_of_transformers_prints_what_it_shows(
    stem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the extra trainers")
    run(stem, capsys)


@pytest.mark.slow
def test_the_page_about_trl_prints_what_it_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="needs pip install trl")
    monkeypatch.chdir(tmp_path)  # the trainers save checkpoints
    run("trl", capsys)


def _in_two_processes(ranks: Ranks, folder: Path) -> None:
    run("fsdp2")


def test_the_page_about_sharded_parameters_runs_in_two_processes() -> None:
    in_ranks(2, _in_two_processes)
