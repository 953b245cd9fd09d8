"""A hook belongs to an object, which may be replaced or copied."""

from collections.abc import Iterator
from weakref import ref

from torch import Tensor, nn

from gradsurg.core.pitfalls.base import (
    GRADIENTS,
    PARAMETERS,
    AttachmentLike,
    Operation,
    Pitfall,
    params_of,
)
from gradsurg.torch_internals import autograd


class NewParameters(Pitfall):
    """A hook belongs to the object that it was registered on, not to its name in the model.

    `load_state_dict(assign=True)`, `fully_shard` and an assignment put other objects there.

    >>> layer, x = nn.Linear(1, 1), torch.ones(1, 1)
    >>> handle = layer.weight.register_hook(lambda grad: print("called"))
    >>> keys = layer.load_state_dict(nn.Linear(1, 1).state_dict(), assign=True)
    >>> layer(x).sum().backward()  # the hook is not called

    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html, `load_state_dict`.
    """

    context, outcome = "load_state_dict(assign=True)", "reported"
    kinds = f"{PARAMETERS} Captured"
    why = "the new parameters are not hooked"
    instead = "Attach after the change, or remove the intervention and add it again"


class Copy(Pitfall):
    """`copy.deepcopy` drops the hooks of a parameter.

    >>> layer = nn.Linear(1, 1)
    >>> handle = layer.weight.register_hook(lambda grad: print("called"))
    >>> copy.deepcopy(layer)(torch.ones(1, 1)).sum().backward()  # the hook is not called
    """

    context, outcome = "deepcopy", "reported"
    kinds = f"{PARAMETERS} {GRADIENTS} ModuleGradients Activations SavedTensors"
    why = "a copy of the model has no hooks"
    instead = "Attach to the copy"


class Replaced(NewParameters):
    """The same for modules, and for parameters that were frozen when the surgery was attached."""

    context, kinds, outcome = "modules or parameters are replaced", "*", "warned"
    why = "{change} while the block was open, and the new ones are not hooked{also}: {names}"
    instead = "attach after the change, or remove the intervention and add it again"

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Operation, dict[int, ref[nn.Module] | ref[Tensor]]] = {}
        self._frozen: dict[Operation, set[int]] = {}

    def attached(self, attachment: AttachmentLike) -> None:
        fresh = [each for each in attachment.operations if each not in self._known]
        if fresh:
            model = attachment.model
            params = params_of(model)
            known = {id(thing): ref(thing) for thing in (*model.modules(), *params)}
            frozen = {id(param) for param in params if not param.requires_grad}
            self._known |= dict.fromkeys(fresh, known)
            self._frozen |= dict.fromkeys(fresh, frozen)

    def closed(self, attachment: AttachmentLike) -> Iterator[str]:
        is_sharded = any(map(autograd.is_sharded, attachment.model.parameters()))
        late = ", as after fully_shard" if is_sharded else ""
        changes = (
            ("modules were replaced or added", " or taken for a part of the module around it"),
            ("parameters were replaced, added or unfrozen", late),
        )
        for cls, (change, also) in zip((nn.Module, Tensor), changes, strict=True):
            found = [self._unhooked(attachment, each, cls) for each in attachment.operations]
            if names := dict.fromkeys(name for each in found for name in each):
                yield self.sentences(change=change, also=also, names=", ".join(names))

    def _unhooked(
        self, attachment: AttachmentLike, operation: Operation, cls: type
    ) -> Iterator[str]:
        """Yield names of selected modules or parameters that came after the intervention."""
        if operation.stage == "step":
            return  # parameters are looked for at each step
        limit = getattr(operation.at, "limit", None)
        if limit and len(operation.memory.admitted.get(operation.at, ())) >= limit:
            return  # more places are not picked
        things = {kind: kind.things(attachment.model) for kind in operation.kinds}
        near = operation.at.search(things, type(operation.memory)(operation.stage))
        for kind, listed in things.items():
            for named in listed:
                names, thing, _ = named
                is_frozen = isinstance(thing, Tensor) and not thing.requires_grad
                if not isinstance(thing, cls) or is_frozen or self._hooks(operation, names, thing):
                    continue
                # Hooks of the process select a new module by the name of its class.
                by_class = named._replace(names=(type(thing).__name__,), owners=(thing,))
                if kind.reaches_new and any(leaf.near(by_class) for leaf in operation.leaves):
                    continue
                if any((kind, name) in near for name in names):
                    yield names[0]

    def _hooks(self, operation: Operation, names: tuple[str, ...], thing: object) -> bool:
        """Whether the hooks of an intervention reach a module or parameter."""
        known = self._known.get(operation, {}).get(id(thing))
        if known is None or known() is not thing:
            return False
        is_unfrozen = id(thing) in self._frozen[operation]
        uses = f"{names[0]}/"  # those of a frozen parameter are known once it has a gradient
        return not is_unfrozen or any(site.startswith(uses) for site in operation.placed)
