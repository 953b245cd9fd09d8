"""The catalogue: every option of a group with its purpose, properties, stages and paper."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gradsurg as gs
from gradsurg.experiment import catalogue
from tests.conftest import Here


def entry(name: str, group: str = "transform") -> catalogue.Entry:
    return next(entry for entry in gs.list(group) if entry.name == name)


def test_the_file_is_up_to_date() -> None:
    assert catalogue.FILE.read_text(encoding="utf-8") == catalogue.measured().json(), (
        "python scripts/stub.py writes it"
    )


def test_every_file_begins_with_its_command_and_purpose() -> None:
    for one in gs.list():
        begin = "python -m gradsurg.run ", "gs.load(", f"python my_app.py +surgery={one.name}"
        assert one.command.startswith(begin), one
        assert not one.summary[0].islower() or one.summary == one.target, one
        assert one.summary.partition(":")[0] not in ("Paper", "package"), one


def test_an_entry_has_the_facts_of_its_class_and_of_the_head_of_its_file() -> None:
    clip = entry("clip_global_norm")
    assert clip.target == "gradsurg.transforms.clip_global_norm.ClipGlobalNorm"
    assert {*clip.properties} == gs.ClipGlobalNorm(1.0).properties
    assert clip.stages == ["backward_end", "step", "forward"]
    assert (clip.paper, clip.url) == (
        "Pascanu, Mikolov, Bengio, ICML 2013",
        "https://arxiv.org/abs/1211.5063",
    )
    assert clip.fields["max_norm"] == 1.0
    assert entry("deconvolve").needs == ["entering"]
    assert entry("deconvolve").stages == ["backward"]
    assert {*entry("mgda", "aggregator").properties} == gs.MGDA().properties
    assert entry("parameters", "site").stages[0] == "backward"
    assert entry("adam", "optimizer").target == "torch.optim.Adam"
    preset = entry("autoclip")
    assert preset.preset_of == "adaptive_clip"
    assert preset.target == entry("adaptive_clip").target
    assert preset.summary == "Clip the joint norm to a quantile of past norms"
    assert preset.url == "https://arxiv.org/abs/2007.14469"
    assert entry("tanh").paper == entry("adaptive_clip").preset_of == ""


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("group", ["transform", "aggregator", "site", "schedule"])
def test_a_table_fits_its_width_and_has_every_name(group: str, width: int) -> None:
    lines = gs.list(group).table(width).splitlines()
    assert max(map(len, lines)) <= width
    assert {one.name for one in gs.list(group)} <= {line.split(" ")[0] for line in lines}


FOUND = {
    "percentile": "transform=autoclip transform=adaptive_clip",
    "Quantile": "transform=autoclip",
    "top-k": "transform=mask transform=dgc",
    "topk": "transform=mask transform=dgc",
    "prune": "transform=mask transform=n_of_m",
    "pruning": "transform=mask",
    "sparse": "transform=mask transform=random_mask transform=soft_threshold",
    "sparsify": "transform=mask transform=dgc",
    "sparsity": "transform=n_of_m",
    "dropout": "transform=random_mask model=mlp",
    "normalize": "transform=norm_rescale transform=unit_norm transform=rescale_global_norm",
    "normalise": "transform=norm_rescale transform=unit_norm",
    "normalization": "transform=unit_norm",
    "weight decay": "transform=add_decayed transform=lars optimizer=adamw",
    "weight_decay": "optimizer=adamw",
    "transform penalty": "transform=add_decayed",
    "clipping": "transform=clip transform=clip_global_norm",
    "clip_grad_norm": "transform=clip_global_norm",
    "ClipGlobalNorm": "transform=clip_global_norm",
    "freeze": "transform=zero",
    "differential privacy": "transform=dp_sgd",
    "saliency": "surgery=guided_backprop experiment=deconvnet transform=deconvolve",
    "exploding": "transform=clip_global_norm transform=skip_update",
    "multi-task dropout": "aggregator=grad_drop",
    "Byzantine": "aggregator=krum aggregator=geometric_median",
    "conflicting": "aggregator=pcgrad",
    "Pascanu": "transform=clip_global_norm",
    "initial_accumulator_value": "optimizer=adagrad",
    "CosineAnnealingLR": "schedule=cosine",
}
"""Words of a user: options that must be found by them."""


@pytest.mark.parametrize("words", FOUND)
def test_options_are_found_by_words_that_mean_them(words: str) -> None:
    found = [f"{one.group}={one.name}" for one in gs.list(words)]
    assert {*FOUND[words].split()} <= {*found}
    assert len(found) <= 25, "words of a purpose are not found in each field"


def test_the_option_of_that_name_comes_first_and_a_group_narrows_the_search() -> None:
    assert gs.list("clip norm")[0].name == "clip_norm"
    assert {one.group for one in gs.list("noise")} > {"transform"}
    assert {one.group for one in gs.list("transforms", "noise")} == {"transform"}
    assert gs.list("recipes") == gs.list("experiment")
    assert gs.list("presets") == gs.list("surgery")


def test_a_search_shows_groups_purposes_and_fields_with_their_defaults(here: Here) -> None:
    text = here("--list", "weight", "decay").out
    legend, _, table = text.partition("\n\n")
    assert "A row ends with the fields and their defaults; to set one: " in " ".join(legend.split())
    assert table.splitlines()[0].split() == ["option", "purpose"]
    _, _, entry = text.partition("\noptimizer=adamw ")
    fields = "torch.optim.AdamW. lr=0.001 betas=[0.9, 0.999] eps=1e-08 weight_decay=0.01"
    assert " ".join(entry.split()).startswith(fields)


def test_options_of_a_users_folder_are_found_by_the_words_at_the_head_of_their_file(
    here: Here, tmp_path: Path
) -> None:
    (tmp_path / "transform").mkdir()
    node = "soft:\n  _target_: gradsurg.Scale\n  factor: 0.5\n"
    text = f"# mine\n# Halve it.\n# Also: gentle, mild\n{node}"
    (tmp_path / "transform" / "soft.yaml").write_text(text, encoding="utf-8")
    *_, line = here("--list", "mild", "--config-dir", str(tmp_path)).out.splitlines()
    assert line.split("  ")[0] == "soft"
    assert line.endswith("Halve it (scale). Scale: factor=0.5")
    assert here("--list", "mild").code == 2
    (tmp_path / "transform" / "torn.yaml").write_text("torn: [", encoding="utf-8")
    ended = here("--list", "mild", "--config-dir", str(tmp_path))
    assert (ended.code, "torn.yaml is no config: " in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("transfrom", "did you mean 'transform'? There is no group or option 'transfrom'"),
        ("quantle", "did you mean 'quantile'?"),
        ("unlearn", "no group or option 'unlearn'. The groups are: "),
        ("sam", "no group or option 'sam'. The groups are: "),
        ("sparse qqqq", "no group or option 'qqqq'. The groups are: transform, "),
        ("???", "no group or option '???'. The groups are: "),
        ("clip --config-dir nowhere", "--list: there is no folder 'nowhere'"),
        ("krum dropout", "no option has all these words. The groups are: "),
    ],
)
def test_words_that_describe_nothing_are_named(here: Here, words: str, said: str) -> None:
    ended = here("--list", *words.split())
    assert ended.code == 2
    assert said in ended.err


def test_a_pipe_gets_80_columns_unless_they_are_set(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert 70 < max(map(len, here("--list", "transform").out.splitlines())) <= 80
    assert 70 < max(map(len, here("--list", "noise").out.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "120")
    assert 110 < max(map(len, here("--list=recipe").out.splitlines())) <= 120
    assert json.loads(here("--list", "trigger", "--json").out) == json.loads(gs.list("when").json())
    overview = here("--list").out
    assert "--list transform " in overview
    assert ", for your own Hydra app\n" in overview
    assert max(map(len, overview.splitlines())) <= 80


def test_the_legend_stands_above_the_table_and_each_class_in_it(here: Here) -> None:
    legend, _, table = here("--list", "transform").out.partition("\n\n")
    assert "d deterministic" in legend
    assert "transform.adaptive_clip.z=2.0" in legend
    assert " Clip: value=0.01" in " ".join(table.split())
    for entry in gs.list("transform"):
        name = entry.target.rpartition(".")[2]
        assert name in "".join(table.split())
        assert entry.name in {one.name for one in gs.list(name)}
    assert gs.list("Clip")[0].name == "clip"


def test_listing_imports_no_torch() -> None:
    code = "import sys, gradsurg; gradsurg.list('sparse'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
