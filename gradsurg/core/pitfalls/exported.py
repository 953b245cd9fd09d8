"""An exported model has no calls of modules."""

from gradsurg.core.pitfalls.base import Pitfall


class Exported(Pitfall):
    """`torch.export` records operations: the exported model calls none of the modules.

    >>> model = torch.export.export(nn.Sequential(nn.ReLU()), (torch.ones(1),)).module()
    >>> [node.target.__name__ for node in model.graph.nodes if "relu" in node.name]
    ['relu.default']

    https://docs.pytorch.org/docs/stable/export.html
    """

    context, kinds, error = "torch.export", "Nodes Uses Captured SavedTensors", LookupError
    why = "an exported model is one graph of operations, which calls none of its modules"
    instead = (
        "Select nodes without module=, parameters, 'root' or 'block', or attach to the model "
        "before torch.export"
    )
