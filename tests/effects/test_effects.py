"""The numbers of an effect, against a slow and obvious second version, and when they are taken."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.effects import effects as effects_module
from gradsurg.effects.effects import Effects
from gradsurg.effects.ledger import Ledger
from gradsurg.effects.numbers import EFFECT_NAMES
from gradsurg.effects.sums import BLOCK, CHUNK
from tests.nets import attached, backward, gradients, small, train, trainee

NAN, INF = float("nan"), float("inf")


def by_hand(before: Tensor, after: Tensor) -> dict[str, Any]:  # Any: None where undefined
    """The numbers of one pair in float64, without the kernels."""
    a, b = (np.array(each.detach().double().flatten().tolist()) for each in (before, after))
    nonzero, lost = (a != 0).sum(), ~(np.isfinite(a) & np.isfinite(b))
    with np.errstate(all="ignore"):
        norm_before, norm_after, apart = (np.sqrt((each**2).sum()) for each in (a, b, b - a))
        if np.isnan(norm_before * norm_after):
            cosine = distance = NAN
        elif norm_before == 0:
            cosine, distance = None, float(norm_after > 0)
        else:
            cosine = (a * b).sum() / (norm_before * norm_after) if norm_after > 0 else 0.0
            distance = apart / norm_before
    changed = ((a != b) & ~(np.isnan(a) & np.isnan(b))).sum() / max(1, len(a))
    flipped = (((a > 0) & (b < 0)) | ((a < 0) & (b > 0))).sum() / max(1, len(a))
    zeroed = ((a != 0) & (b == 0)).sum() / nonzero if nonzero else None
    numbers = norm_before, norm_after, cosine, changed, flipped, zeroed, distance, lost.sum()
    return dict(zip(EFFECT_NAMES, numbers, strict=True))


def assert_row(row: dict[str, object], pairs: list[tuple[Tensor, Tensor]]) -> None:
    """A row is the mean over its pairs; `nonfinite` is their total."""
    numbers = [by_hand(before, after) for before, after in pairs]
    assert row["sampled"] == len(pairs)
    assert row["nonfinite"] == sum(each["nonfinite"] for each in numbers)
    for name in EFFECT_NAMES[:-1]:
        known = [each[name] for each in numbers if each[name] is not None]
        if not known:
            assert row[name] is None, name
            continue
        mean = sum(known) / len(known)
        assert row[name] == pytest.approx(mean, rel=2e-5, abs=1e-7, nan_ok=True), name


def slots(*names: str, transform: str = "t") -> tuple[Effects, list[int]]:
    effects, ledger = Effects(1), Ledger()
    return effects, [effects.slot(transform, ledger.enter(transform, name)) for name in names]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


BASE = random(3, 7)
SEVENTH = torch.tensor([7])
BLOCKS, OTHERS = random(3 * BLOCK), random(3 * BLOCK, seed=1)
PAIRS = {
    "unchanged": (BASE, BASE),
    "equal but another tensor": (BASE, BASE.clone()),
    "clipped": (BASE, BASE.clamp(-0.5, 0.5)),
    "sign flipped": (BASE, -BASE),
    "some signs flipped": (BASE, BASE * torch.arange(-10.0, 11).view(3, 7)),
    "zeroed": (BASE, torch.zeros(3, 7)),
    "some zeroed": (BASE, BASE.relu()),
    "from zero": (torch.zeros(4), torch.ones(4)),
    "zero to zero": (torch.zeros(4), torch.zeros(4)),
    "negative zero": (torch.zeros(2), -torch.zeros(2)),
    "NaN stays": (torch.tensor([1.0, NAN, 2.0]), torch.tensor([1.0, NAN, 1.0])),
    "NaN removed": (torch.tensor([1.0, NAN, -2.0]), torch.tensor([1.0, 0.0, 2.0])),
    "NaN made": (torch.tensor([1.0, 3.0, -2.0]), torch.tensor([1.0, NAN, 2.0])),
    "infinity stays": (torch.tensor([INF, -INF, 2.0]), torch.tensor([INF, -INF, 2.0])),
    "infinity clipped": (torch.tensor([INF, -INF, 2.0]), torch.tensor([1.0, -1.0, 1.0])),
    "infinity zeroed": (torch.tensor([INF, 2.0]), torch.zeros(2)),
    "infinity made": (torch.tensor([1.0, 2.0]), torch.tensor([-INF, 2.0])),
    "0-dim": (torch.tensor(3.0), torch.tensor(-1.0)),
    "empty": (torch.zeros(0, 3), torch.zeros(0, 3)),
    "bf16": (random(5, 5, dtype=torch.bfloat16), random(5, 5, seed=1, dtype=torch.bfloat16)),
    "float16": (random(9, dtype=torch.float16), random(9, seed=1, dtype=torch.float16)),
    "float64": (random(9).double() * 1e30, random(9, seed=1).double() * 1e30),
    "channels last": (
        random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        random(2, 3, 4, 5, seed=1).to(memory_format=torch.channels_last),
    ),
    "two layouts": (random(4, 6).t(), random(6, 4, seed=1)),
    "expanded": (random(1).expand(3, 4), random(4, seed=1).expand(3, 4)),
    "a view with gaps": (random(8, 6)[::2, 1:], random(8, 6, seed=1)[::2, 1:]),
    "negated by a bit": (random(5, dtype=torch.complex64).conj().imag, random(5)),
    "no memory": (vars(torch)["_efficientzerotensor"](3), torch.ones(3)),
    "tiny": (torch.tensor([1.0, 1e-30]), torch.tensor([1.0, -1e-30])),
    "one NaN in a block": (BLOCKS, OTHERS.index_fill(0, SEVENTH, NAN)),
    "one NaN stays": (BLOCKS.index_fill(0, SEVENTH, NAN), OTHERS.index_fill(0, SEVENTH, NAN)),
    "not contiguous": (random(4, 6).t(), random(4, 6, seed=1).t()),
    "larger than a chunk": (random(CHUNK + 17), random(CHUNK + 17, seed=1)),
    "several chunks": (random(3, CHUNK), random(3, CHUNK).clamp(-1, 1)),
}


@pytest.mark.parametrize("has_numba", [True, False])
def test_pairs_of_all_sizes_and_dtypes_measured_together_keep_to_their_own_numbers(
    has_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_numba:
        monkeypatch.setattr("gradsurg.effects.sums.cpu_kernels", dict)
    effects, places = slots(*PAIRS)
    for slot, pair in zip(places, PAIRS.values(), strict=True):
        effects.add(slot, *pair)
    rows = effects.fetch()
    assert [row["site"] for row in rows] == list(PAIRS)
    for row, pair in zip(rows, PAIRS.values(), strict=True):
        assert_row(row, [pair])
    first = effects.first_nonfinite
    assert first is not None
    assert first.site == "NaN made"


@pytest.mark.parametrize("most", [effects_module.MAX_PAIRS, 3])
def test_all_gradients_are_measured_as_they_were_when_they_were_added(most, monkeypatch) -> None:
    monkeypatch.setattr(effects_module, "MAX_PAIRS", most)
    effects, (slot,) = slots("w")
    pairs = [(random(11, seed=seed), random(11, seed=seed + 1)) for seed in range(50)]
    for before, after in pairs:
        spoilt = before.clone(), after.clone()
        effects.add(slot, *spoilt)
        for tensor in spoilt:
            tensor.zero_()
    (row,) = effects.fetch()
    assert_row(row, pairs)


def test_fetch_gives_what_is_new_and_rows_all() -> None:
    effects, (slot, other) = slots("w", "v")
    first, second = (BASE, BASE.relu()), (torch.zeros(4), torch.zeros(4))  # without a cosine
    effects.add(slot, *first)
    assert_row(effects.rows()[0], [first])
    assert_row(effects.fetch()[0], [first])
    assert effects.fetch() == []
    effects.add(slot, *second)
    effects.add(other, *second)
    both, alone = effects.rows()
    assert_row(both, [first, second])
    assert_row(alone, [second])
    new, alone = effects.fetch()
    assert_row(new, [second])
    assert_row(alone, [second])


@pytest.mark.parametrize(("every", "sampled"), [(0, 0), (1, 10), (3, 4), (100, 1)])
def test_effects_every_says_which_steps_are_measured(every: int, sampled: int) -> None:
    model, optimizer = trainee()
    with attached(model, gs.Identity(), None, optimizer, effects_every=every) as live:
        train(model, optimizer, 10)
        rows = live.effects.rows()
    assert [row["sampled"] for row in rows] == [sampled] * (4 if sampled else 0)
    assert (live.effects.table() == "no gradient was measured") is (every == 0)
    assert repr(live.effects) == (
        "Effects at 4 sites: table() is a text, rows() are the numbers"  # no internals
    )


def rows_of(live: gs.Live) -> dict[str, dict[str, object]]:
    return {str(row["site"]): row for row in live.effects.rows()}


def plain_gradients(step: int = 0) -> dict[str, Tensor]:
    model = small()
    backward(model, step)
    return gradients(model)


@pytest.mark.parametrize("stage", ["backward", "accumulated", "step"])
def test_each_link_of_a_chain_is_measured_by_itself(stage) -> None:
    model, optimizer = trainee()
    chain = gs.Chain(gs.Clip(0.02), gs.Scale(-3.0), gs.Zero())
    with attached(model, chain, gs.Parameters(stage=stage), optimizer) as live:
        train(model, optimizer, 1)
        rows = {(row["transform"], row["site"]): row for row in live.effects.rows()}
    for name, grad in plain_gradients().items():
        clipped = grad.clamp(-0.02, 0.02)
        assert_row(rows["clip", name], [(grad, clipped)])
        assert_row(rows["scale", name], [(clipped, -3 * clipped)])
        assert_row(rows["zero", name], [(-3 * clipped, 0 * clipped)])
    assert len(rows) == 12


def test_a_shadowed_transform_is_measured_and_not_applied() -> None:
    model = small()
    with attached(model, gs.Scale(-2.0), shadow=True) as live:
        backward(model)
        rows = rows_of(live)
    plain = plain_gradients()
    for name, grad in gradients(model).items():
        assert torch.equal(grad, plain[name])
        assert_row(rows[name], [(plain[name], -2 * plain[name])])


def test_quantiles_are_those_of_all_entries_each_gradient_counted_by_its_size() -> None:
    effects, places = slots("large", "small", "lost")
    large, tiny = random(400, 250), 100 * random(1000, seed=1)
    lost = torch.tensor([NAN, INF])
    for slot, grad in zip(places, (large, tiny, lost), strict=True):
        effects.add(slot, grad, grad)
    levels = (0.0, 0.25, 0.5, 0.9)
    quantiles = effects.quantiles("t", levels)
    entries = torch.cat([large.flatten(), tiny]).abs().double().numpy()
    expected = np.quantile(entries, levels)
    assert quantiles[0] < 0.02
    assert quantiles[1:] == pytest.approx(expected[1:], rel=0.25)
    assert effects.quantiles("t", [1.0])[0] > 100
    assert effects.quantiles("another", levels) == []


@pytest.mark.parametrize(
    ("grads", "levels", "quantiles"),
    [
        ([[-4.0, 3, 1, -2]], [0.0, 0.25, 0.5, 0.51, 0.75, 0.9, 1.0], [1, 1, 2, 3, 3, 4, 4]),
        ([[NAN]], [0.5], []),
        ([[1.0] * 3, [2.0] * 3], [0.5], [2]),
    ],
    ids=["few are exact", "nothing finite", "of the newest"],
)
def test_quantiles(grads: list[list[float]], levels: list[float], quantiles: list[float]) -> None:
    effects, (slot,) = slots("w")
    for grad in map(torch.tensor, grads):
        effects.add(slot, grad, grad)
        effects.fetch()
    assert effects.quantiles("t", levels) == quantiles


def extremes_by_hand(norms: list[float]) -> tuple[float | None, int | None, int | None]:
    """The largest finite norm, its step, and the first step that is not finite."""
    finite = [norm for norm in norms if np.isfinite(norm)]
    bad = [step for step, norm in enumerate(norms) if not np.isfinite(norm)]
    largest = max(finite, default=None)
    step = None if largest is None else norms.index(largest)
    return largest, step, bad[0] if bad else None


@pytest.mark.parametrize("most", [effects_module.MAX_PAIRS, 5])
@pytest.mark.parametrize("read_every", [1, 3, 100])
def test_the_extremes_over_the_steps_are_the_first_ones(most, read_every, monkeypatch) -> None:
    monkeypatch.setattr(effects_module, "MAX_PAIRS", most)
    effects, places = slots("up", "tie", "bad", "spike", "never finite")
    norms = {
        "up": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        "tie": [0.0, 2.0, 2.0, 1.0, 2.0, 0.0, 0.0],
        "bad": [1.0, 3.0, 2.0, NAN, INF, 2.0, 9.0],
        "spike": [1.0, 1.0, 1.0, 1.0, 50.0, INF, INF],
        "never finite": [NAN, NAN, NAN, NAN, NAN, INF, 3.0],
    }
    for step in range(7):
        effects.begin(step)
        for name, slot in reversed([*zip(norms, places, strict=True)]):
            grad = torch.tensor([0.0, norms[name][step]])
            effects.add(slot, grad, grad)
        if step % read_every == 0:
            effects.fetch()
    for row, (name, own) in zip(effects.rows(), norms.items(), strict=True):
        found = row["norm_max"], row["norm_max_step"], row["nonfinite_step"]
        assert found == extremes_by_hand(own), name
    ranks = {row["site"]: row["nonfinite_rank"] for row in effects.rows()}
    assert ranks == {"never finite": 1, "bad": 2, "spike": 3, "up": None, "tie": None}


def test_the_rank_is_that_in_the_backward_pass() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    model[1].weight.register_hook(lambda grad: grad / 0)
    model[1].register_full_backward_hook(lambda module, entering, leaving: (entering[0] / 0,))
    x = torch.ones(1, 2, requires_grad=True)
    with attached(model, gs.Identity()) as live:
        model(x).sum().backward()
        ranks = {row["site"]: row["nonfinite_rank"] for row in live.effects.rows()}
        assert "first NaN or infinity" in live.effects.table()
    known = {site: rank for site, rank in ranks.items() if rank is not None}
    assert sorted(known.values()) == [1, 2, 3]
    assert known["1.weight"] == 1
    assert {"0.weight", "0.bias"} < known.keys()


def test_an_infinite_norm_of_finite_entries_is_the_largest() -> None:
    effects, (slot, other) = slots("w", "v")
    for grad in (torch.tensor([3.0]), torch.tensor([3e38, 3e38]), torch.tensor([4.0])):
        effects.add(slot, grad, grad)
        effects.add(other, grad / 0, grad)
    row, unknown = effects.rows()
    assert (row["norm_max"], row["nonfinite_step"]) == (INF, None)
    assert (unknown["norm_max"], unknown["nonfinite_step"]) == (None, 0)


def test_a_transform_that_makes_a_gradient_infinite_leaves_the_norm_before() -> None:
    effects, (slot,) = slots("w")
    effects.add(slot, torch.tensor([3.0]), torch.tensor([INF]))
    (row,) = effects.rows()
    assert (row["norm_max"], row["nonfinite_step"], row["nonfinite_rank"]) == (3.0, 0, 1)


def test_a_frame_has_the_rows_and_all_columns_also_without_a_row() -> None:
    pl = pytest.importorskip("polars", reason="frames are those of polars")
    effects, (slot,) = slots("w")
    empty = effects.frame()
    effects.add(slot, BASE, BASE.relu())
    frame = effects.frame()
    assert frame.to_dicts() == effects.rows()
    assert frame.schema == empty.schema
    assert frame.schema["nonfinite_step"] == pl.Int64
    assert frame.filter(pl.col("norm_max") > 0)["site"].to_list() == ["w"]


def test_a_frame_without_polars_is_a_list_of_rows(monkeypatch) -> None:
    monkeypatch.setattr(effects_module, "find_spec", lambda name: None)
    effects, (slot,) = slots("w")
    effects.add(slot, BASE, BASE)
    assert effects.frame() == effects.rows()
    assert len(effects.rows()) == 1


def test_a_notebook_shows_a_table() -> None:
    effects, (slot,) = slots("a<b>")
    effects.others["t"] = "activations"
    effects.add(slot, torch.tensor([3.0, NAN]), torch.tensor([3.0, NAN]))
    html = vars(Effects)["_repr_html_"](effects)
    assert "<tr><th>site</th><th>norm before</th>" in html
    assert "<tr><td>a&lt;b&gt;</td><td>nan</td>" in html
    assert "<p>first NaN or infinity: a&lt;b&gt; (step 0)</p>" in html
    assert "activations, not gradients</p>" in html
    assert html.count("<table>") == html.count("</table>") == 1
    assert "no gradient" in vars(Effects)["_repr_html_"](Effects(1))


def test_effects_go_on_where_a_checkpoint_ended() -> None:
    pairs = [(random(11, seed=seed), random(11, seed=seed + 1)) for seed in range(4)]
    whole, (slot,) = slots("w")
    ledger = Ledger()
    part = Effects(1)
    part.add(part.slot("t", ledger.enter("t", "w")), *pairs[0])
    part.fetch()
    saved, entries = part.state(), ledger.state()
    ledger, again = Ledger(), Effects(1)
    ledger.resume(entries)
    again.resume(saved, ledger)
    resumed = again.slot("t", ledger.enter("t", "w"))
    whole.add(slot, *pairs[0])
    whole.fetch()
    assert again.quantiles("t", [0.5]) == whole.quantiles("t", [0.5])
    assert again.rows() == whole.rows()
    for pair in pairs[1:]:
        whole.add(slot, *pair)
        again.add(resumed, *pair)
    assert again.fetch() == whole.fetch()
    assert again.rows() == whole.rows()


def test_effects_of_an_earlier_checkpoint_load_without_extremes() -> None:
    effects, ledger = Effects(1), Ledger()
    effects.add(effects.slot("t", ledger.enter("t", "w")), BASE, BASE)
    effects.fetch()
    state, entries = effects.state(), ledger.state()
    for slot in state["slots"]:
        assert slot.pop("extremes")
    ledger, again = Ledger(), Effects(1)
    ledger.resume(entries)
    again.resume(state, ledger)
    (old,), (row,) = again.rows(), effects.rows()
    assert old == row | {"norm_max": None, "norm_max_step": None}
    again.begin(9)
    again.add(again.slot("t", ledger.enter("t", "w")), BASE / 2, BASE)
    assert again.rows()[0]["norm_max_step"] == 9


def test_calls_are_all_calls_since_the_last_row_not_only_those_sampled() -> None:
    model, optimizer = trainee()
    with attached(model, gs.Clip(0.1), gs.Parameters("last.*"), optimizer, effects_every=4) as live:
        train(model, optimizer, 2)
        assert [(row["calls"], row["sampled"]) for row in live.effects.fetch()] == [(2, 1)] * 2
        train(model, optimizer, 1, start=2)
        assert live.effects.fetch() == []
        train(model, optimizer, 6, start=3)
        assert [(row["calls"], row["sampled"]) for row in live.effects.fetch()] == [(7, 2)] * 2
        assert [(row["calls"], row["sampled"]) for row in live.effects.rows()] == [(9, 3)] * 2
