"""The identity of a run: its hash, the name of its directory, versions."""

import pytest

from gradsurg.experiment.run_identity import MAX_LABEL, directory_name, environment, run_hash


def test_the_environment_has_a_hash_of_the_source_of_gradsurg(tmp_path, monkeypatch) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "one.py").write_text("x = 1\n", encoding="utf-8")
    monkeypatch.setattr("gradsurg.experiment.run_identity.PACKAGE", tmp_path)
    first = environment.__wrapped__()
    (tmp_path / "inside" / "one.py").write_text("x = 2\n", encoding="utf-8")
    second = environment.__wrapped__()
    assert first.pop("gradsurg") != second.pop("gradsurg")
    assert first == second


def test_the_hash_does_not_depend_on_the_order_of_keys():
    config = {"lr": 0.1, "model": {"_target_": "gradsurg.models.mlp.MLP", "hidden": [64, 64]}}
    same = {"model": {"hidden": (64, 64), "_target_": "gradsurg.models.mlp.MLP"}, "lr": 0.1}
    assert run_hash(config) == run_hash(same)
    assert run_hash(config) != run_hash({**config, "lr": 0.2})
    # sha256 of {"a":1}: the first eight digits, from coreutils' sha256sum
    assert run_hash({"a": 1}) == "015abd7f"


def test_the_hash_refuses_values_that_json_cannot_represent():
    with pytest.raises(TypeError):
        run_hash({"a": object()})
    with pytest.raises(ValueError, match="Out of range"):
        run_hash({"a": float("nan")})


def test_a_directory_name_has_safe_characters_only():
    config = {"a": 1}
    assert directory_name("clip=0.01,mlp", config) == "clip=0.01,mlp-015abd7f"
    assert directory_name("a/b *c", config) == "a_b_c-015abd7f"
    assert len(directory_name("x" * 500, config)) == MAX_LABEL + 9
