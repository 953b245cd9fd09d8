"""A parametrized tensor is computed from parameters of other names."""

from torch.nn.utils.parametrize import ParametrizationList

from gradsurg.core.pitfalls.base import PARAMETERS, AttachmentLike, Pitfall


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
        model = attachment.model
        lists = [
            (path, module)
            for path, module in model.named_modules()
            if isinstance(module, ParametrizationList)
        ]
        for operation in attachment.operations if lists else ():
            kinds = operation.kinds
            things = {kind: {each.names[0]: each for each in kind.things(model)} for kind in kinds}
            for path, module in lists:
                prefix, _, tensor = path.rpartition("parametrizations.")
                names, name = dict(module.named_parameters(path, recurse=False)), prefix + tensor
                owners = (model.get_submodule(prefix.rstrip(".")),)
                # The selector misses what it would pick under the name of the tensor.
                for kind in kinds:
                    behind = [things[kind][each] for each in names if each in things[kind]]
                    named = [each._replace(names=(name,), owners=owners) for each in behind]
                    if not any((kind, each.names[0]) in operation.near for each in behind) and any(
                        leaf.near(each) for leaf in operation.leaves for each in named
                    ):
                        operation.note(self.why.format(name=name, parameters=", ".join(names)))
