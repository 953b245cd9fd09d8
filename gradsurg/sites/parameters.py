"""Parameters: the gradient of each parameter."""

from collections.abc import Callable, Sequence
from typing import ClassVar
from weakref import ref

from torch import Tensor

from gradsurg.plugins.fields import validated
from gradsurg.sites.calls import Shared
from gradsurg.sites.places import Door, Kind, Named, Place, SiteFn, Stage
from gradsurg.sites.selectors import ParamSelector, params_of
from gradsurg.torch_internals import autograd


def watch(door: Door, found: Sequence[Named], shared: Shared) -> None:
    """Hook each parameter that an intervention picks."""
    stack = door.stack
    for names, param, _ in found:
        assert isinstance(param, Tensor)
        held = ref(param)
        place = Place(BACKWARD, names, held)
        if not param.requires_grad:
            door.none(place, "frozen")
            continue
        if (hook := door.meet(place)) is None:
            continue
        if autograd.is_sharded(param):
            door.refuse("FSDP2", BACKWARD, place.site)
        # The parameter itself is handed over, as its `data` may be replaced while it is hooked.
        reads = not hook.asks.isdisjoint({"value", "storage"})
        call = _with_value(hook.call, held) if reads else hook.call
        stack.callback(param.register_hook(call).remove)


def _with_value(call: SiteFn, held: "ref[Tensor]") -> Callable[[Tensor], Tensor | None]:
    return lambda grad: call(grad, held())


BACKWARD = Kind("Parameters", "backward", params_of, watch, known_at="watch")


@validated
class Parameters(ParamSelector):
    """The gradients of the parameters whose name fits `pattern`, a glob or `re:`.

    Stage `backward`: the gradient of one backward pass, before it is added to `.grad`. `types` is a
    pattern on the class of the module that owns the parameter; `depth`, `index`, `ndim` and `size`
    (its number of entries) are a number or a pair (lowest, highest). A tied parameter is one site
    with several names. A frozen parameter is skipped and reported in the ledger.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("backward",)

    def kind_at(self, stage: Stage | None) -> Kind:
        return BACKWARD
