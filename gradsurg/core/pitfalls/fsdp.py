"""fully_shard trains parts of parameters."""

from gradsurg.core.pitfalls.base import SHARDED, Pitfall


class Sharded(Pitfall):
    """`fully_shard` makes parameters DTensors, and computes with tensors gathered from them.

    Their gradients flow to the gathered tensors, are averaged, cut into parts, and written to
    `.grad`. Hooks of the parameters, which wait for gradients of DTensors, are not called.

    >>> layer = fully_shard(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1,)))
    >>> handle = layer.weight.register_hook(lambda grad: print("called"))
    >>> layer(torch.ones(1, 1)).sum().backward()  # the hook is not called

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    context, kinds, error = "FSDP2", f"{SHARDED} Buckets Captured", TypeError
    why = (
        "sharded parameters are DTensors: autograd computes with other tensors, and their hooks do "
        "not run"
    )
    instead = (
        "Use Parameters with stage='step' or stage='accumulated' for the averaged gradient, or "
        "Outputs, Inputs or Nodes"
    )


class SeveralMeshes(Sharded):
    """A mesh of several dimensions has a group of processes for each."""

    context, kinds = "FSDP2, meshes", "Parameters"
    why = "sharded over a mesh of {ndim} dimensions, needs one dimension"
    instead = ""


class OtherShards(Sharded):
    """With another number of processes each has another part of a parameter and of its state."""

    context, kinds, error = "FSDP2, resumed", "Parameters", ValueError
    why = (
        "the surgery has the state of {made} processes, each with its part of the parameters; "
        "found {found} processes"
    )
    instead = ""


class PartsOfParameters(Sharded):
    """A gradient in `.grad` is a part, which does not show the norm of the whole."""

    context, kinds, error = "FSDP2, accumulated", "Parameters", ValueError
    why = "the parameters are sharded, and {reason}"
    instead = "Use stage='step'"


class PartsOfRows(Sharded):
    """The same for the gradients of several tasks, which an aggregator compares."""

    context, kinds = "FSDP2, aggregators", "SharedParameters"
    why = "the parameters are sharded, and {reason}"
    instead = "Use another aggregator, or DistributedDataParallel"
