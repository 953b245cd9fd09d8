"""Parameters: the gradient of each parameter."""

from collections.abc import Callable, Sequence
from typing import ClassVar
from weakref import ref

from torch import Tensor

from gradsurg.plugins.fields import Contradiction, validated
from gradsurg.sites.backward_end import hook_backward_ends
from gradsurg.sites.calls import Shared
from gradsurg.sites.grads import Steps, access_to, actor, hook_accumulated, places_of
from gradsurg.sites.places import Door, Kind, Named, PlacesHook, SiteFn, Stage
from gradsurg.sites.selectors import ParamSelector, params_of
from gradsurg.sites.step_hooks import Act
from gradsurg.transforms.base import Need


def _watch_backward(door: Door, found: Sequence[Named], shared: Shared) -> None:
    stack = door.stack
    for place in places_of(door, BACKWARD, found):
        param, hook = place.thing, door.meet(place)
        assert isinstance(param, Tensor)
        assert hook is not None
        # The parameter itself is handed over, as its `data` may be replaced while it is hooked.
        reads = not hook.asks.isdisjoint({"value", "storage"})
        call = _with_value(hook.call, ref(param)) if reads else hook.call
        stack.callback(param.register_hook(call).remove)


def _with_value(call: SiteFn, held: "ref[Tensor]") -> Callable[[Tensor], Tensor | None]:
    return lambda grad: call(grad, held())


def _watch_accumulated(door: Door, found: Sequence[Named], shared: Shared) -> None:
    hook_accumulated(door, places_of(door, ACCUMULATED, found, takes_shards=True))


def _watch_backward_end(door: Door, found: Sequence[Named], shared: Shared) -> None:
    hook_backward_ends(door, places_of(door, BACKWARD_END, found))


def _watch_step(door: Door, found: Sequence[Named], shared: Shared) -> None:
    def make(hook: PlacesHook, _: object) -> tuple[Act, None]:
        return actor(hook, access_to(door, hook)), None

    Steps(door, STEP, make, is_joint=True).hook(found)


BACKWARD = Kind("Parameters", "backward", params_of, _watch_backward, known_at="watch")
ACCUMULATED = Kind("Parameters", "accumulated", params_of, _watch_accumulated, known_at="watch")
BACKWARD_END = Kind("Parameters", "backward_end", params_of, _watch_backward_end, known_at="watch")
STEP = Kind("Parameters", "step", params_of, _watch_step, known_at="watch")
KINDS = {kind.mode: kind for kind in (BACKWARD, ACCUMULATED, BACKWARD_END, STEP)}


@validated
class Parameters(ParamSelector):
    """Select the gradients of the parameters whose name fits `pattern`, a glob or `re:`.

    `types` is a pattern on the class of the module that owns the parameter, and `depth` is the
    number of parts in that module's name. `index` is the last number in the parameter's name,
    `size` the number of its entries. `depth`, `index`, `ndim` and `size` are a number or a pair
    (lowest, highest). The stages:

    - `backward`, the default of transforms of one gradient, is the gradient of one backward pass
      before it is added to `.grad`;
    - `accumulated` is the running sum in `.grad` after each backward pass;
    - `backward_end` is all `.grad`s at the end of a pass;
    - `step`, the default of group transforms, which need all gradients at once, is the unscaled and
      accumulated gradient that the optimizer is about to use.

    A tied parameter is one site with several names. A frozen parameter is skipped and reported in
    the ledger.

    At `step` the parameters are those that fit and that the optimizers hold at each step, also
    frozen ones that are trained later. A group transform acts on those of all optimizers before the
    first of them steps.

    At `backward_end`, which needs no optimizer, a transform acts on the parameters that the pass
    has reached; an older `.grad` of others is left alone. The parameters of a nested backward pass
    (reentrant checkpoint) join the outer one. Nothing is done after `autograd.grad`, which adds to
    no `.grad`, or a pass that raises. Warnings on detach report gradients added before the
    exception, and an optimizer that steps and clears `.grad` inside the pass. In
    DistributedDataParallel it acts after the average, on all parameters, and not in a pass of
    `no_sync` or one that does not reach the output of the model.

    >>> model = nn.Linear(2, 1)
    >>> with gs.Surgery(gs.Intervention(gs.Sign(), at=gs.Parameters("weight"))).attach(model):
    ...     model(torch.tensor([1.0, -2.0])).sum().backward()
    >>> model.weight.grad, model.bias.grad
    (tensor([[ 1., -1.]]), tensor([1.]))
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward", "accumulated", "backward_end", "step")
    group_stages: ClassVar[tuple[Stage, ...]] = ("step", "backward_end")

    def __post_init__(self) -> None:
        if self.stage == "reduced":
            raise Contradiction("stage", "Parameters has no 'reduced' any more: use 'backward_end'")

    @property
    def provides(self) -> frozenset[Need]:
        can_skip = self.stage != "backward_end"
        return frozenset({"value", "examples", "skip"} if can_skip else {"value", "examples"})

    def kind_at(self, stage: Stage | None) -> Kind:
        return KINDS[stage or self.stage or "backward"]
