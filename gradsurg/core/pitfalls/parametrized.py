"""A parametrized tensor is computed from parameters of other names."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from gradsurg.core.pitfalls.base import PARAMETERS, AttachmentLike, Operation, Pitfall


class Parametrized(Pitfall):
    """`register_parametrization` puts parameters of other names in the place of a parameter.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> layer = torch.nn.utils.parametrizations.weight_norm(layer)
    >>> [name for name, _ in layer.named_parameters()]
    ['parametrizations.weight.original0', 'parametrizations.weight.original1']

    https://docs.pytorch.org/tutorials/intermediate/parametrizations.html
    """

    context, kinds, outcome = "parametrized", PARAMETERS, "warned"
    why = "'{name}' is parametrized and not selected: its parameters are {parameters}"

    def attached(self, attachment: AttachmentLike) -> None:
        for prefix, module in attachment.model.named_modules():
            tensors = getattr(module, "parametrizations", None) if is_parametrized(module) else None
            for tensor, parametrization in tensors.items() if tensors else ():
                inside = f"{prefix}.parametrizations.{tensor}".lstrip(".")
                behind = dict(parametrization.named_parameters(inside, recurse=False))
                name = f"{prefix}.{tensor}".lstrip(".")
                for operation in attachment.operations:
                    if self._misses(attachment, operation, name, module, behind):
                        text = self.why.format(name=name, parameters=", ".join(behind))
                        operation.note(text)

    def _misses(
        self,
        attachment: AttachmentLike,
        operation: Operation,
        name: str,
        module: nn.Module,
        behind: Mapping[str, Tensor],
    ) -> bool:
        """Whether an intervention picks the name of a tensor, and no parameter behind it."""
        for kind in operation.kinds:
            own = [each for each in kind.things(attachment.model) if each.names[0] in behind]
            named = [each._replace(names=(name,), owners=(module,)) for each in own]
            is_picked = any((kind, each.names[0]) in operation.near for each in own)
            if not is_picked and any(
                leaf.near(each) for leaf in operation.leaves for each in named
            ):
                return True
        return False
