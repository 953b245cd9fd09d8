"""A hook belongs to an object, which may be replaced or copied."""

from collections.abc import Iterator, Sequence
from weakref import ref

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from gradsurg.core.pitfalls.base import (
    GRADIENTS,
    PARAMETERS,
    AttachmentLike,
    Cell,
    Operation,
    Pitfall,
)
from gradsurg.plugins.messages import shortened
from gradsurg.torch_internals import autograd


class Replaced(Pitfall):
    """A hook belongs to the object that it was registered on, not to its name in the model.

    `load_state_dict(assign=True)`, `fully_shard` and an assignment put other objects there, and
    `functional_call` computes with the tensors that it is given. `copy.deepcopy` drops the hooks of
    a parameter. A parameter that was frozen when the surgery was attached has no hook.

    >>> layer, x = nn.Linear(1, 1), torch.ones(1, 1)
    >>> handle = layer.weight.register_hook(lambda grad: print("called"))
    >>> copied, given = copy.deepcopy(layer), nn.Linear(1, 1).state_dict()
    >>> copied(x).sum().backward()  # the hook is not called
    >>> call = lambda given: torch.func.functional_call(layer, given, x).sum()
    >>> grads = torch.func.grad(call)(given)  # the hook is not called
    >>> keys = layer.load_state_dict(given, assign=True)
    >>> layer(x).sum().backward()  # the hook is not called

    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html, `load_state_dict`;
    https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html
    """

    cells = (
        Cell("load_state_dict(assign=True)", f"{PARAMETERS} Captured").reported(
            "the new parameters are not hooked. "
            "Attach after the change, or call live.remove(..) and live.add(..)."
        ),
        Cell(
            "deepcopy", f"{PARAMETERS} {GRADIENTS} ModuleGradients Activations SavedTensors"
        ).reported("a copy of the model has no hooks. Attach to the copy."),
        Cell("torch.func", f"{PARAMETERS} Captured").reported(
            "the gradients are of the tensors given to functional_call, not of the parameters. "
            "Use Outputs or Inputs."
        ),
        Cell("modules or parameters are replaced", "*").warned(
            "{change} in the block and have no hooks{also}: {names}. "
            "Attach after that, or use live.remove and live.add."
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Operation, _Known] = {}

    def attached(self, attachment: AttachmentLike) -> None:
        fresh = [each for each in attachment.operations if each not in self._known]
        if fresh:
            self._known |= dict.fromkeys(fresh, _Known(attachment))

    def closed(self, attachment: AttachmentLike) -> Iterator[str]:
        found: dict[tuple[str, bool], None] = {}  # names, and whether it is a parameter
        for operation in attachment.operations:
            if self._known[operation].has_changed(attachment):
                found |= dict.fromkeys(self._unhooked(attachment, operation))
        params = (thing for thing in _things(attachment) if isinstance(thing, Tensor))
        is_sharded = found and any(map(autograd.is_sharded, params))
        late = ", for example after fully_shard" if is_sharded else ""
        for is_param, change, also in (
            (False, "modules were replaced or added", ""),
            (True, "parameters were replaced, added or unfrozen", late),
        ):
            if names := shortened(name for name, of_param in found if of_param is is_param):
                context = "modules or parameters are replaced"
                yield self.text(context, change=change, also=also, names=names)

    def _unhooked(
        self, attachment: AttachmentLike, operation: Operation
    ) -> Iterator[tuple[str, bool]]:
        """Yield the selected modules and parameters that came after the intervention."""
        if operation.stage == "step":
            return  # parameters are looked for at each step
        limit = getattr(operation.at, "limit", None)
        if limit and len(operation.memory.admitted.get(operation.at, ())) >= limit:
            return  # the limit is reached: no further place can be picked
        things = {kind: kind.things(attachment.model) for kind in operation.kinds}
        near = operation.at.search(things, type(operation.memory)(operation.stage))
        known = self._known[operation]
        for kind, named in ((kind, each) for kind, listed in things.items() for each in listed):
            (name, *_), thing, _ = named
            # Hooks on all modules of the process select a new module by the name of its class.
            by_class = named._replace(names=(type(thing).__name__,), owners=(thing,))
            is_reached = kind.reaches_new and any(leaf.near(by_class) for leaf in operation.leaves)
            # The uses of a frozen parameter are known once it has a gradient.
            is_used = known.was_frozen(thing) and any(
                site.startswith(f"{name}/") for site in operation.placed
            )
            is_near = any((kind, each) in near for each in named.names)
            if is_near and known.lacks(thing) and not is_reached and not is_used:
                yield name, isinstance(thing, Tensor)


class _Known:
    """The modules and parameters of a model when an intervention was attached.

    A parameter that needed no gradient then has no hook.
    """

    def __init__(self, attachment: AttachmentLike) -> None:
        things = _things(attachment)
        self._refs = {id(thing): ref(thing) for thing in things}
        self._frozen = {id(thing) for thing in things if _is_frozen(thing)}

    def has_changed(self, attachment: AttachmentLike) -> bool:
        """Whether any was added, replaced, moved or unfrozen since."""
        things = _things(attachment)
        # An id may belong to another object once its first one is gone.
        is_same = [*map(id, things)] == [*self._refs] and all(
            each() is not None for each in self._refs.values()
        )
        return not is_same or any(map(self.lacks, things if self._frozen else ()))

    def lacks(self, thing: object) -> bool:
        """Whether a module or a parameter that needs a gradient came later, or was frozen."""
        if _is_frozen(thing):
            return False
        known = self._refs.get(id(thing))
        return known is None or known() is not thing or id(thing) in self._frozen

    def was_frozen(self, thing: object) -> bool:
        """Whether it is a parameter that needed no gradient then."""
        return id(thing) in self._frozen and self._refs[id(thing)]() is thing


def _things(attachment: AttachmentLike) -> Sequence[nn.Module | Tensor]:
    params = attachment.params_of(attachment.model)
    return [*attachment.model.modules(), *(named.thing for named in params)]


def _is_frozen(thing: object) -> bool:
    return isinstance(thing, Tensor) and not thing.requires_grad


class Parametrized(Pitfall):
    """`register_parametrization` puts parameters of other names in the place of a parameter.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> layer = torch.nn.utils.parametrizations.weight_norm(layer)
    >>> [name for name, _ in layer.named_parameters()]
    ['parametrizations.weight.original0', 'parametrizations.weight.original1']

    https://docs.pytorch.org/tutorials/intermediate/parametrizations.html
    """

    cells = (
        Cell("parametrized", PARAMETERS).warned(
            "'{name}' is not selected: it is parametrized. Select {parameters}"
        ),
    )

    def attached(self, attachment: AttachmentLike) -> None:
        model = attachment.model
        params = attachment.params_of(model)
        owned = (pair for each in params for pair in zip(each.names, each.owners, strict=True))
        lists = {
            owner: name.rpartition(".")[0]
            for name, owner in owned
            if isinstance(owner, ParametrizationList)
        }
        operations = attachment.operations if lists else ()
        for operation, kind in ((each, kind) for each in operations for kind in each.kinds):
            params = [each for each in kind.things(model) if isinstance(each.thing, Tensor)]
            for module, path in lists.items():
                prefix, _, tensor = path.rpartition("parametrizations.")
                name, owner = prefix + tensor, model.get_submodule(prefix.rstrip("."))
                behind = [each for each in params if module in each.owners]
                # The selector misses what it would pick under the name of the tensor.
                is_missed = not any((kind, each.names[0]) in operation.near for each in behind)
                renamed = [each._replace(names=(name,), owners=(owner,)) for each in behind]
                if is_missed and any(
                    leaf.near(each) for leaf in operation.leaves for each in renamed
                ):
                    parts = ", ".join(each.names[0] for each in behind)
                    operation.note(self.text("parametrized", name=name, parameters=parts))
