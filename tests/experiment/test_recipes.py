"""Recipes: a surgery as a file that the library and the command line share; ten against oracles."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsurg as gs
from gradsurg.experiment.recipes import recipes
from gradsurg.models.mlp import MLP
from gradsurg.models.multi_head import MultiHead
from gradsurg.models.resnet import ResNet
from gradsurg.models.vit import ViT
from gradsurg.transforms.base import TransformContext, fixed_weights
from tests.conftest import Here

SHIPPED = {
    "guided_backprop",
    "deconvnet",
    "sgm",
    "linbp",
    "pna",
    "grokfast",
    "ef_signsgd",
    "dgc",
    "feedback_alignment",
    "gradient_reversal",
    "tgr",
    "dp_sgd",
}


def test_the_shipped_recipes_are_listed() -> None:
    assert set(recipes()) == SHIPPED
    assert {entry.name for entry in gs.list("recipe")} >= SHIPPED


def stored(folder: Path, text: str) -> Path:
    path = folder / "experiment" / "mine.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


MINE = """# @package _global_
defaults:
- override /transform: [clip]
- override /site: outputs
- override /when: null
- override /aggregator: mgda
transform:
  clip: {value: 0.5}
  b.c: {name: error_feedback, of: {name: graft, direction: {name: sign}, magnitude: {name: zero}}}
site: {types: ReLU}
when:
  name: any_of
  of: [{name: unless, of: {name: steps, start: 3, stop: 5}}, {name: flag, flag: f}]
shared: {granularity: ['1e5*', '*']}
seed: 3
"""


def test_a_file_is_loaded_and_read_by_the_command_line(here: Here, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    made = gs.Surgery(
        gs.Intervention(
            gs.Chain(gs.Clip(0.5), gs.ErrorFeedback(gs.Graft(gs.Sign(), gs.Zero()))),
            at=gs.Outputs(types="ReLU"),
            when=~gs.Steps(3, 5) | gs.Flag("f"),
            names=("clip", "b.c"),
        ),
        gs.Intervention(gs.MGDA(), at=gs.SharedParameters(granularity=("1e5*", "*"))),
        seed=3,
    )
    assert repr(gs.load(stored(tmp_path / "own", MINE))) == repr(made)
    stored(tmp_path / "own", "\n".join(line for line in MINE.split("\n") if "mgda" not in line))
    ended = here("--config-dir", "own", "experiment=mine", "dry_run=true")
    assert ended.code == 0, ended.err
    assert "hidden.0.relu#0" in ended.out


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["guided_backrop"], LookupError, r"no recipe 'guided_backrop'.*Did you mean 'guided_bac"),
        (["pascanu2013"], ValueError, r"^pascanu2013: is a study, no recipe: it sets task, model"),
        (["simple_transforms"], ValueError, r"it sets study, hydra; a recipe sets transform, site"),
        (["missing/one.yaml"], FileNotFoundError, r"missing/one.yaml"),
        (["sgm", "lr=3"], ValueError, r"^sgm: lr=3: is no key of a recipe, which are transform"),
        (["sgm", "site.patern=x"], ValueError, r"^sgm: site.patern: .*Did you mean 'pattern'"),
        (["sgm", "transform.scale.factor=x"], ValueError, r"scale.factor: must be a number, found"),
        (["sgm", "seed=x"], ValueError, r"^sgm: seed: must be a whole number >= 0, found 'x'"),
    ],
)
def test_a_wrong_recipe_is_refused(words: list[str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        gs.load(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]\n", r"must be a mapping, found \[1, 2\]"),
        ("a: [\n", r"is no yaml"),
        ("transform: {}\n", r"must begin with '# @package _global_'"),
        ("# @package _global_\nseed: 3\n", r"sets no transform, site or aggregator"),
        ("# @package _global_\nsite: {patern: x}\n", r"patern"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        gs.load(stored(tmp_path, text))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "transform: {x: {_target_: TARGET, fields}}",
            r"transform\.x\._target_: .* is not of gradsurg",
        ),
        ("transform: {x: {name: graft, direction: {_target_: TARGET, fields}}}", "own_code=True"),
        (
            "site: {_target_: TARGET, fields}",
            r"site\._target_: .* is not of gradsurg",
        ),
        (
            "when: {_target_: TARGET, fields}",
            r"when\._target_: recipe_code\.write is not of gradsurg",
        ),
        ("aggregator: {_target_: TARGET, fields}", r"aggregator\._target_: .* is not of gradsurg"),
    ],
)
def test_code_that_a_recipe_names_is_neither_called_nor_imported_unasked(
    part: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "open('imported', 'w')\ndef write(path):\n    open(path, 'w')\n"
    (tmp_path / "recipe_code.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = part.replace("TARGET", "recipe_code.write").replace("fields", "path: called")
    path = stored(tmp_path, f"# @package _global_\n{text}\n")
    for overrides in ([], ["transform.x.typo=1"]):
        with pytest.raises(ValueError, match=message):
            gs.load(path, *overrides)
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "called").exists()


def test_a_class_of_another_kind_is_not_called(tmp_path: Path) -> None:
    text = (
        "# @package _global_\ntransform: {x: {_target_: subprocess.Popen, args: [touch, FILE]}}\n"
    )
    path = stored(tmp_path, text.replace("FILE", str(tmp_path / "touched")))
    with pytest.raises(ValueError, match="must be a Transform, found the class Popen"):
        gs.load(path, own_code=True)
    text = "# @package _global_\nwhen: {_target_: gradsurg.transforms.clip.Clip}\n"
    with pytest.raises(ValueError, match="when: must be a Trigger, found the class Clip"):
        gs.load(stored(tmp_path, text))


def test_overrides_change_a_recipe() -> None:
    surgery = gs.load("sgm", "transform.scale.factor=0.2", "site.edge=1", "seed=4")
    (item,) = surgery.interventions
    assert item.transform == gs.Scale(0.2)
    assert item.at == gs.Nodes("Add", side="leave", edge=1)
    assert surgery.seed == 4


# Oracles.


def gradients(model: nn.Module, inputs: Tensor, surgery: gs.Surgery | None = None) -> list[Tensor]:
    """The gradients of the inputs and of the parameters that have one."""
    inputs = inputs.clone().requires_grad_()
    leaves = [inputs, *model.parameters()]
    if surgery is None:
        grads = torch.autograd.grad(model(inputs).sin().sum(), leaves, allow_unused=True)
    else:
        with surgery.attach(model, effects_every=0):
            grads = torch.autograd.grad(model(inputs).sin().sum(), leaves, allow_unused=True)
    return [grad for grad in grads if grad is not None]


class Ruled(nn.Module):
    """A ReLU whose backward is `rule(x, e)`, e the gradient of its output."""

    def __init__(self, rule: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x: Tensor) -> Tensor:
                ctx.save_for_backward(x)
                return x.relu()

            @staticmethod
            def backward(ctx, *grad_outputs: Tensor) -> Tensor:
                (e,) = grad_outputs
                return rule(ctx.saved_tensors[0], e)

        self.function = Function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


def resnet() -> ResNet:
    torch.manual_seed(0)
    return ResNet((1, 8, 8), 3, width=4).double()


def images() -> Tensor:
    return torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def differs(results: list[Tensor], plain: list[Tensor]) -> bool:
    return any(not torch.allclose(*pair) for pair in zip(results, plain, strict=True))


def rescaled(x: Tensor, e: Tensor) -> Tensor:
    """Linear backpropagation with the norm, per example, of the gradient with the mask."""
    true = (e * (x > 0)).flatten(1).norm(dim=1) / e.flatten(1).norm(dim=1)
    return e * true.view(-1, *[1] * (e.ndim - 1))


@pytest.mark.parametrize(
    ("name", "rule", "stages"),
    [
        ("guided_backprop", lambda x, e: e.relu() * (x > 0), (0, 1, 2)),
        ("deconvnet", lambda x, e: e.relu(), (0, 1, 2)),
        ("linbp", rescaled, (1, 2)),
    ],
)
def test_recipes_at_relus_are_relus_with_a_backward_of_their_own(
    name: str, rule: Callable[[Tensor, Tensor], Tensor], stages: tuple[int, ...]
) -> None:
    model = resnet()
    plain, result = gradients(model, images()), gradients(model, images(), gs.load(name))
    for stage in stages:
        for block in model.stages[stage].children():
            block.relu1, block.relu2 = Ruled(rule), Ruled(rule)
    if 0 in stages:
        model.relu = Ruled(rule)
    expected = gradients(model, images())
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert differs(result, plain)


@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU:UserWarning")
@pytest.mark.parametrize(
    ("name", "theirs"), [("guided_backprop", "GuidedBackprop"), ("deconvnet", "Deconvolution")]
)
def test_recipes_at_relus_are_captums(name: str, theirs: str) -> None:
    attr = pytest.importorskip("captum.attr")
    model, inputs = resnet().eval(), images().requires_grad_()
    targets = torch.tensor([0, 1, 2])
    expected = getattr(attr, theirs)(model).attribute(inputs, target=targets)
    with gs.load(name).attach(model, effects_every=0):
        outputs = model(inputs).gather(1, targets[:, None]).sum()
        (result,) = torch.autograd.grad(outputs, inputs)
    assert torch.equal(result, expected)


class Decayed(nn.Module):
    """The same value, and a gradient times gamma."""

    def __init__(self, module: nn.Module, gamma: float) -> None:
        super().__init__()
        self.module, self.gamma = module, gamma

    def forward(self, x: Tensor) -> Tensor:
        branch = self.module(x)
        return self.gamma * branch + (1 - self.gamma) * branch.detach()


def test_sgm_decays_the_gradient_through_each_residual_branch() -> None:
    model = resnet()
    surgery = gs.load("sgm", "transform.scale.factor=0.3")
    plain, result = gradients(model, images()), gradients(model, images(), surgery)
    for stage in model.stages.children():
        for block in stage.children():
            block.norm2 = Decayed(block.norm2, 0.3)
    expected = gradients(model, images())
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert differs(result, plain)


def test_pna_is_attention_with_a_constant_attention_map(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = ViT((1, 8, 8), 3, width=8, num_heads=2).double()
    plain, result = gradients(model, images()), gradients(model, images(), gs.load("pna"))

    def constant_map(queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool) -> Tensor:
        scores = queries @ keys.mT / queries.shape[-1] ** 0.5
        return scores.softmax(-1).detach() @ values

    monkeypatch.setattr("gradsurg.models._transformer.scaled_dot_product_attention", constant_map)
    expected = gradients(model, images())
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
    assert differs(result, plain)


def test_tgr_zeroes_the_extreme_tokens_at_the_input_of_each_mlp() -> None:
    torch.manual_seed(0)
    model = ViT((1, 8, 8), 3, width=8, num_heads=2).double()
    image = images()[:1]  # the authors take the extremes of the first example
    plain, result = gradients(model, image), gradients(model, image, gs.load("tgr"))

    def authors(grad: Tensor) -> Tensor:
        grad, channels = grad * 0.5, range(grad.shape[2])
        largest, smallest = grad[0].argmax(0), grad[0].argmin(0)
        grad[:, largest, channels] = 0.0
        grad[:, smallest, channels] = 0.0
        return grad

    class Branch(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            x = x.view_as(x)
            x.register_hook(authors)
            return self.module(x)

    for block in model.blocks.children():
        block.mlp = Branch(block.mlp)
    expected = gradients(model, image)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert differs(result, plain)


def trained(surgery: gs.Surgery | None, edit: Callable[[Tensor, int], Tensor] | None) -> Tensor:
    """Weights after six steps of plain SGD, with a surgery or with gradients edited by hand."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)

    def steps() -> None:
        for _ in range(6):
            inputs = torch.randn(5, 6, dtype=torch.float64, generator=generator)
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            for index, param in enumerate(model.parameters()):
                if edit is not None:
                    param.grad = edit(param.grad, index)
            optimizer.step()

    if surgery is None:
        steps()
    else:
        with surgery.attach(model, optimizer, effects_every=0):
            steps()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def grokfast() -> Callable[[Tensor, int], Tensor]:
    means: dict[int, Tensor] = {}

    def edit(grad: Tensor, index: int) -> Tensor:
        if index not in means:
            means[index] = grad
        means[index] = 0.98 * means[index] + (1 - 0.98) * grad
        return grad + 2.0 * means[index]

    return edit


def ef_signsgd() -> Callable[[Tensor, int], Tensor]:
    errors: dict[int, Tensor] = {}

    def edit(grad: Tensor, index: int) -> Tensor:
        p = grad + errors.get(index, torch.zeros_like(grad))
        delta = p.abs().sum() / p.numel() * p.sign()
        errors[index] = p - delta
        return delta

    return edit


def dgc() -> Callable[[Tensor, int], Tensor]:
    sums: dict[int, tuple[Tensor, Tensor]] = {}

    def edit(grad: Tensor, index: int) -> Tensor:
        grad = grad * min(1.0, 1.0 / grad.norm().item())
        u, v = sums.get(index, (torch.zeros_like(grad), torch.zeros_like(grad)))
        u = 0.9 * u + grad
        v = v + u
        threshold = v.abs().flatten().topk(max(1, round(0.25 * v.numel()))).values[-1]
        mask = v.abs() >= threshold
        sums[index] = (u * ~mask, v * ~mask)
        return v * mask

    return edit


@pytest.mark.parametrize(
    ("words", "loop"),
    [
        (["grokfast"], grokfast),
        (["ef_signsgd"], ef_signsgd),
        (["dgc", "transform.dgc.amount=0.25"], dgc),
    ],
)
def test_recipes_at_parameters_are_loops_of_their_paper(
    words: list[str], loop: Callable[[], Callable[[Tensor, int], Tensor]]
) -> None:
    result, expected = trained(gs.load(*words), None), trained(None, loop())
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(result, trained(None, None))


def test_dp_sgd_clips_the_gradient_of_each_example_and_adds_noise() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(6, 4, dtype=torch.float64)

    def result(*words: str) -> Tensor:
        optimizer.zero_grad()
        surgery = gs.load("dp_sgd", "transform.dp_sgd.of.max_norm=1.6", *words)
        with surgery.attach(model, optimizer, effects_every=0):
            model(x).square().mean().backward()
            optimizer.step()
        grads = [param.grad for param in model.parameters()]
        return torch.cat([grad.flatten() for grad in grads if grad is not None])

    total = torch.zeros(19, dtype=torch.float64)
    norms = []
    for one in x:
        grads = torch.autograd.grad(model(one[None]).square().mean(), [*model.parameters()])
        flat = torch.cat([grad.flatten() for grad in grads])
        norms.append(float(flat.norm()))
        total += flat * min(1.0, 1.6 / (norms[-1] + 1e-6))
    assert min(norms) < 1.6 < max(norms)
    clipped = result("transform.dp_sgd.noise=0")
    torch.testing.assert_close(clipped, total / 6, rtol=1e-9, atol=1e-12)
    noises = torch.cat(
        [result("transform.dp_sgd.noise=2", f"seed={n}") - clipped for n in range(12)]
    )
    deviation = 2 * 1.6 / 6
    assert abs(float(noises.std()) / deviation - 1) < 4 / (2 * len(noises)) ** 0.5
    assert abs(float(noises.mean())) < 4 * deviation / len(noises) ** 0.5


def test_feedback_alignment_is_backpropagation_through_fixed_matrices() -> None:
    torch.manual_seed(0)
    model = MLP((5,), 3, hidden=[4, 4], activation="tanh").double()
    x = torch.randn(7, 5, dtype=torch.float64)
    with gs.load("feedback_alignment").attach(model, effects_every=0):
        model(x).sin().sum().backward()

    def matrix(name: str, like: Tensor, rows: int) -> Tensor:
        context = TransformContext(f"feedback_weights/{name}#0/AddmmBackward[0].1")
        return fixed_weights(context, 1.0, rows, like).to(like.dtype)

    first, second, output = (m for m in model.modules() if isinstance(m, nn.Linear))
    h1 = first(x).tanh()
    h2 = second(h1).tanh()
    e3 = output(h2).cos()
    e2 = e3 @ matrix("output", h2, 3) * (1 - h2**2)
    e1 = e2 @ matrix("hidden.1.linear", h1, 4) * (1 - h1**2)
    for layer, error, entering in ((first, e1, x), (second, e2, h1), (output, e3, h2)):
        torch.testing.assert_close(layer.weight.grad, error.T @ entering, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(layer.bias.grad, error.sum(0), rtol=1e-10, atol=1e-12)


def test_gradient_reversal_subtracts_the_gradient_of_the_domain_classifier() -> None:
    torch.manual_seed(0)
    model = MultiHead((5,), 5, heads=(3, 2), hidden=[4]).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    names, params = zip(*model.named_parameters(), strict=True)
    label, domain = (
        dict(zip(names, torch.autograd.grad(loss, params, allow_unused=True), strict=True))
        for loss in (model(x)[0].sin().sum(), model(x)[1].sin().sum())
    )
    with gs.load("gradient_reversal", "transform.gradient_reversal.strength=0.5").attach(
        model, effects_every=0
    ):
        sum(out.sin().sum() for out in model(x)).backward()
    for name, param in model.named_parameters():
        if name.startswith("heads.1"):
            expected = domain[name]
        elif name.startswith("heads.0"):
            expected = label[name]
        else:
            expected = label[name] - 0.5 * domain[name]
        torch.testing.assert_close(param.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_the_command_of_a_recipe_trains(name: str, here: Here) -> None:
    entry = next(entry for entry in gs.list("recipe") if entry.name == name)
    words = entry.command.split()[3:]
    ended = here(*words, "steps=2", "seeds=1", "logger=none", "report=false")
    assert ended.code == 0, ended.err
