"""The names that the pages of docs/how/ take as the reader's own, and what holds after their code.

`SETUPS` has a function for each page whose model or data are of another form than `plain`'s;
`CHECKS` has one for each block of a page whose result is asserted.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradsurg as gs

Names = dict[str, Any]  # Any: what a page defines
SETUPS: dict[str, Callable[[], Names]] = {}
CHECKS: dict[tuple[str, int], Callable[[Names], None]] = {}


def setup(stem: str) -> Callable[[Callable[[], Names]], Callable[[], Names]]:
    def keep(function: Callable[[], Names]) -> Callable[[], Names]:
        SETUPS[stem] = function
        return function

    return keep


def after(stem: str, block: int) -> Callable[[Callable[[Names], None]], Callable[[Names], None]]:
    def keep(function: Callable[[Names], None]) -> Callable[[Names], None]:
        CHECKS[stem, block] = function
        return function

    return keep


def plain() -> Names:
    """Two linear layers with a ReLU between, SGD without momentum, four batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    loader = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(4)]
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": loader,
        "loss_fn": cross_entropy,
        "first": [param.detach().clone() for param in model.parameters()],
    }


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """The reader's training loop, which stands for the `...` of a page."""
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def gradients(names: Names) -> list[Tensor]:
    """The gradients of the first batch."""
    x, y = names["loader"][0]
    names["model"].zero_grad()
    names["loss_fn"](names["model"](x), y).backward()
    return [param.grad.clone() for param in names["model"].parameters()]


def is_unchanged(names: Names, index: int) -> bool:
    """Whether a parameter has the value that it had before the page."""
    return torch.equal([*names["model"].parameters()][index], names["first"][index])


@after("backward_hook", 0)
def _hooked(names: Names) -> None:
    weight, bias, last, _ = gradients(names)
    for name in ("on_tensor", "on_module", "on_grad"):
        names[name].remove()
    unhooked = gradients(names)
    torch.testing.assert_close(weight, (2 * unhooked[0]).clamp(-0.01, 0.01))
    torch.testing.assert_close(bias, 2 * unhooked[1])
    torch.testing.assert_close(last, unhooked[2] / 2)
    names["unhooked"] = unhooked


@after("backward_hook", 1)
def _hooks_of_gradsurg(names: Names) -> None:
    rows = {row["site"]: row for row in names["live"].effects.rows()}
    assert rows["0.weight"]["changed"] > 0.5
    assert rows["2.weight"]["norm_after"] == rows["2.weight"]["norm_before"] / 2
    assert rows["1#0.input"]["norm_after"] == 2 * rows["1#0.input"]["norm_before"]
    optimizer = names["optimizer"]
    before = gradients(names)
    optimizer.step()
    assert before[0].abs().max() > 0.01  # the hooks are gone


@setup("clip")
def _with_a_convolution() -> Names:
    torch.manual_seed(0)
    layers = nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(24, 3))
    first = [param.detach().clone() for param in model.parameters()]
    return plain() | {"model": model, "first": first}


@after("clip", 0)
def _clipped_once(names: Names) -> None:
    rows = names["live"].effects.rows()
    assert [row["calls"] for row in rows] == [1] * 4  # one step, not four batches
    assert sum(row["norm_before"] ** 2 for row in rows) > 0.1**2
    assert abs(sum(row["norm_after"] ** 2 for row in rows) - 0.1**2) < 1e-5
    assert not any(is_unchanged(names, index) for index in range(4))
    model, both, scaler = names["model"], (names["adamw"], names["muon"]), names["scaler"]
    skip = gs.Intervention(gs.SkipUpdate(), at=gs.Parameters(stage="step"))
    for skips in ([skip], []):
        with gs.Surgery(*skips, *names["surgery"].interventions).attach(model, both, scaler=scaler):
            scaler.scale(model(names["x"]).sum()).backward()
            model[1].weight.grad.fill_(torch.nan)
            for method in (scaler.unscale_, scaler.step):
                for optimizer in both:
                    method(optimizer)
            scaler.update()
        assert model[4].weight.isnan().any() == (skips == [])


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(8, 16))
        self.add_module("1", nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("1")(self.get_submodule("0")(x).relu())


@setup("compile")
def _net() -> Names:
    torch.manual_seed(0)
    model, names = _Net(), plain()
    return names | {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


@after("compile", 0)
def _compiled_as_not_compiled(names: Names) -> None:
    other = _net()
    with names["surgery"].attach(other["model"], other["optimizer"]):
        train(other["model"], other["optimizer"], other["loader"], other["loss_fn"])
    weight = names["model"].get_submodule("0").weight
    torch.testing.assert_close(weight, other["model"].get_submodule("0").weight)
    other = _net()
    train(other["model"], other["optimizer"], other["loader"], other["loss_fn"])
    assert not torch.allclose(weight, other["model"].get_submodule("0").weight)


@setup("embedding_rows")
def _tokens() -> Names:
    """With momentum and weight decay, which move rows without a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 6), nn.Flatten(), nn.Linear(24, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = [(torch.randint(10, (32, 4)), torch.randint(3, (32,)))] * 3
    names = plain() | {"model": model, "optimizer": optimizer, "loader": loader}
    _step(names)
    return names


def _step(names: Names) -> None:
    gradients(names)
    names["optimizer"].step()


def _rows_changed(names: Names) -> list[int]:
    changed = (names["weight"] != names["before"]).any(dim=1)
    return changed.nonzero().flatten().tolist()


@after("embedding_rows", 0)
def _rows_are_written_back(names: Names) -> None:
    _step(names)
    assert _rows_changed(names) == [8, 9]
    names["handle"].remove()


@after("embedding_rows", 1)
def _only_new_rows_moved(names: Names) -> None:
    assert _rows_changed(names) == [8, 9]
    _step(names)
    assert _rows_changed(names) == [*range(10)]  # outside the block all move


@setup("exploding")
def _deep() -> Names:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(32, 32, bias=False), nn.LayerNorm(32), nn.ReLU()) for _ in range(24)
    ]
    for block in blocks:
        block.get_submodule("1").requires_grad_(False)
    nn.init.normal_(blocks[17].get_submodule("0").weight, std=1e-3)
    model = nn.Sequential(*blocks)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "loader": [(torch.randn(64, 32), torch.randn(64, 32))] * 20,
        "loss_fn": nn.functional.mse_loss,
    }


@setup("freeze")
def _with_momentum_and_decay() -> Names:
    names = plain()
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=0.01)
    _step(names)
    names["first"] = [param.detach().clone() for param in names["model"].parameters()]
    return names


@after("freeze", 0)
def _frozen(names: Names) -> None:
    names["model"][2].weight.grad = None
    x, y = names["loader"][0]
    names["loss_fn"](names["model"](x), y).backward()
    names["optimizer"].step()
    assert [is_unchanged(names, index) for index in range(4)] == [True, True, False, False]
    names |= _with_momentum_and_decay()


@after("freeze", 1)
def _frozen_in_the_block(names: Names) -> None:
    assert [is_unchanged(names, index) for index in range(4)] == [True, True, False, False]
    _step(names)
    assert not is_unchanged(names, 0)


@setup("logs")
def _sixty() -> Names:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(60)]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": [(torch.randn(8, 16), torch.randn(8, 1))] * 100,
        "loss_fn": nn.functional.mse_loss,
        "run": _Logger(),
    }


class _Logger:
    """The method of a W&B run that the page calls."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert step == 99
        self.numbers |= numbers


@after("logs", 0)
def _logged(names: Names) -> None:
    logged = names["run"].numbers
    assert 25 < len(logged) < 45
    places = {name.removeprefix("effect/clip/").rpartition("/")[0] for name in logged}
    assert {"mean", "worst_cosine/1", "worst_norm_ratio/3", "block/0.0..9.0"} <= places
    assert "60.weight" not in places


class _Heads(nn.Module):
    """A shared first layer and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 3) for _ in "ab"])

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[0](self.trunk(x).relu())


@setup("migrate")
def _of_each_library() -> Names:
    """The names of the loops of the other libraries."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 8), torch.randint(3, (12,))
    model = _Heads()
    layers = nn.Conv2d(1, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3, bias=False)

    def losses_of(features: Tensor, y: Tensor) -> list[Tensor]:
        first, second = (head(features.relu()) for head in model.heads)
        return [cross_entropy(first, y), second.square().mean()]

    return {
        "model": model,
        "trunk": model.trunk,
        "losses_of": losses_of,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),  # weights stay
        "loss_fn": cross_entropy,
        "x": x,
        "y": y,
        "net": nn.Sequential(*layers),
        "image": torch.randn(2, 1, 8, 8),
        "one_hot": torch.eye(3)[[0, 0]],
    }


def _norm(names: Names) -> float:
    grads = [p.grad for p in names["model"].parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return getattr(norm, "full_tensor", lambda: norm)().item()  # of a DTensor


@after("migrate", 0)
def _the_joint_norm_is_clipped(names: Names) -> None:
    assert abs(_norm(names) - 0.1) < 1e-4
    names["model"].zero_grad()


@after("migrate", 1)
def _the_losses_are_aggregated(names: Names) -> None:
    assert names["model"].trunk.weight.grad.any()
    assert names["live"].conflicts.numbers()
    names["model"].zero_grad()


@after("migrate", 2)
def _the_relevance_adds_up_to_one_as_in_zennit(names: Names) -> None:
    total = names["relevance"].sum(dim=(1, 2, 3))
    torch.testing.assert_close(total, torch.ones(2), rtol=1e-3, atol=1e-5)


@after("migrate", 3)
def _each_example_is_clipped(names: Names) -> None:
    assert 0 < _norm(names) <= 0.1
    (row,) = names["live"].examples.values()
    assert row.numbers()["norm_median"] > 0.1


@setup("nan")
def _seeded() -> Names:
    torch.manual_seed(0)
    return {}


@after("nan", 1)
def _repaired(names: Names) -> None:
    assert names["model"][0].weight.grad.isnan().all()
    v = torch.tensor([0.0, 4.0], requires_grad=True)
    bad = torch.where(v > 0, v.sqrt(), 0)
    good = torch.where(v > 0, torch.where(v > 0, v, 1).sqrt(), 0)
    assert torch.autograd.grad(bad.sum(), v)[0][0].isnan()
    assert torch.autograd.grad(good.sum(), v)[0].tolist() == [0, 0.25]


@after("one_norm", 0)
def _two_norms(names: Names) -> None:
    parameters = [*names["model"].parameters()]
    norms = [
        torch.nn.utils.get_total_norm([p.grad for p in pair]).item()
        for pair in (parameters[:2], parameters[2:])
    ]
    assert norms[0] <= 0.1001
    assert norms[1] <= 0.2001
    _step(names)
    assert max(p.grad.norm() for p in parameters) > 0.2


@setup("pcgrad")
def _two_regressions() -> Names:
    """Two targets with the same linear and opposite quadratic terms."""
    torch.manual_seed(0)
    x = torch.randn(128, 4)
    product = x[:, 0] * x[:, 1]
    targets = torch.stack([x[:, 2] + product, x[:, 2] - product], dim=1)

    class Batches:
        def __iter__(self):
            return iter([torch.randint(128, (32,)) for _ in range(80)])

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def losses_of(model: nn.Module, rows: Any) -> dict[str, Tensor]:
        errors = (model(x[rows]) - targets[rows]).square()
        return {"first": errors[:, 0].mean(), "second": errors[:, 1].mean()}

    def error(model: nn.Module) -> float:
        return sum(loss.item() for loss in losses_of(model, slice(None)).values()) / 2

    given = {"make_model": make_model, "losses_of": losses_of, "error": error}
    return given | {"loader": Batches()}


@setup("routing")
def _labelled() -> Names:
    torch.manual_seed(0)
    layers = nn.Embedding(20, 8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 20)
    model = nn.Sequential(*layers)
    tokens = torch.randint(10, (4, 7))  # all have label 0
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(tokens, torch.randint(20, (4, 7)))],
        "loss_fn": cross_entropy,
    }


@after("routing", 0)
def _only_one_half_was_trained(names: Names) -> None:
    grad = names["model"][1].weight.grad
    assert grad[:3].any()
    assert not grad[3:].any()


@after("routing", 1)
def _only_unmasked_tokens_were_trained(names: Names) -> None:
    model, (tokens, targets) = names["model"], names["loader"][0]
    mask = torch.ones(4, 7)
    mask[:, :4] = 0
    model.zero_grad()
    with names["surgery"].attach(model) as live:
        live.set_batch(mask=mask)
        names["loss_fn"](model(tokens).flatten(0, 1), targets.flatten()).backward()
    moved = model[0].weight.grad.any(dim=1)
    assert moved.nonzero().flatten().tolist() == tokens[:, 4:].unique().tolist()


@setup("unlearning")
def _trained() -> Names:
    torch.manual_seed(0)
    x = torch.randn(300, 4)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    forget = x[:, 2] > 1  # 56 of the 300 examples
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(200):
        adam.zero_grad()
        cross_entropy(model(x), y).backward()
        adam.step()

    def retained() -> float:
        return cross_entropy(model(x[~forget]), y[~forget]).item()

    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.2),
        "loss_fn": cross_entropy,
        "forget_batch": lambda: (x[forget], y[forget]),
        "retain_batch": lambda: (x[~forget], y[~forget]),
        "retained": retained,
        "before": retained(),
    }


@after("unlearning", 0)
def _forgotten_and_retained(names: Names) -> None:
    assert names["forgotten"] >= 0.7
    assert names["retained"]() < 1.1 * names["before"]
    numbers = names["live"].conflicts.numbers("conflict")
    assert numbers["conflict/agem/shared/cosine/forget~retain"] < -0.5


@setup("attnlrp")
def _repeats_the_token_after_10() -> Names:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.randint(10, (n, 10))
        place = torch.randint(1, 9, (n,))
        tokens[range(n), place - 1] = 10
        tokens[:, -1] = 11
        return tokens, place, tokens[range(n), place]

    for _ in range(200):
        tokens, _, answer = batch(64)
        optimizer.zero_grad()
        cross_entropy(model(tokens).logits[:, -1], answer).backward()
        optimizer.step()
    tokens, place, answer = batch(200)
    return {"model": model, "tokens": tokens, "place": place, "answer": answer}


@after("attnlrp", 0)
def _the_answer_is_the_most_relevant_token(names: Names) -> None:
    found = names["relevance"].argmax(1) == names["place"]
    assert found.float().mean() > 0.95


@setup("huggingface")
def _gpt2() -> Names:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "eos_token_id": 0}
    config = GPT2Config(**sizes, bos_token_id=0, attn_implementation="eager")
    return {"model": GPT2LMHeadModel(config).eval(), "tokens": torch.randint(50, (2, 8))}


@after("huggingface", 0)
def _earlier_layers_get_zero(names: Names) -> None:
    model = names["model"]
    assert not model.transformer.wpe.weight.grad.any()
    assert model.transformer.h[1].attn.c_attn.weight.grad.any()
    model.zero_grad()


@after("huggingface", 1)
def _zeroed(names: Names) -> None:
    names["model"].zero_grad()


@after("huggingface", 2)
def _queries_and_keys_get_zero(names: Names) -> None:
    grad = names["model"].transformer.h[0].attn.c_attn.weight.grad
    assert not grad[:, :32].any()
    assert grad[:, 32:].any()


@setup("trl")
def _tiny() -> Names:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["[pad]", "[eos]", "is", "it", "day", "night", "yes", "no"]
    ids = {word: number for number, word in enumerate(words)}
    split = Tokenizer(models.WordLevel(ids, unk_token="[pad]"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": len(words)}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)
    pair = {"prompt": "is it day", "chosen": " yes", "rejected": " no"}

    def reward(completions: list[str], **others: object) -> list[float]:
        return [float(text.count("yes")) for text in completions]

    return {
        "model": GPT2LMHeadModel(config),
        "reference": GPT2LMHeadModel(config),
        "tokenizer": PreTrainedTokenizerFast(
            tokenizer_object=split, pad_token="[pad]", eos_token="[eos]"
        ),
        "options": {
            "max_steps": 2,
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
        },
        "pairs": Dataset.from_list([pair] * 16),
        "prompts": Dataset.from_list([{"prompt": "is it day"}] * 16),
        "reward": reward,
    }


@after("trl", 0)
def _the_joint_norm_was_clipped(names: Names) -> None:
    log = names["trainer"].state.log_history[0]
    assert "rewards/margins" in log
    ratio = log["effect/clip_global_norm/mean/norm_ratio"]
    assert abs(ratio - 0.1 / log["grad_norm"]) < 1e-3
    names["options"] |= {"num_generations": 4, "max_completion_length": 4}


@after("trl", 1)
def _the_blocks_were_clipped(names: Names) -> None:
    log = names["trainer"].state.log_history[0]
    assert log["effect/clip_norm/transformer.h.1#0/norm_after"] <= 0.01001


@setup("fsdp2")
def _sharded() -> Names:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)  # the same weights in both processes
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    for part in (model[0], model[2], model):
        fully_shard(part)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": [(x, x[:, :3].argmax(1))] * 2,
        "loss_fn": cross_entropy,
    }


@after("fsdp2", 0)
def _the_part_is_smaller_than_the_whole(names: Names) -> None:
    assert 0 < names["part"] < names["whole"]
    assert _norm(names) < 0.0501


@after("fsdp2", 1)
def _the_whole_is_clipped(names: Names) -> None:
    assert _norm(names) < 0.0501
    _step(names)
    assert _norm(names) > 0.0501
