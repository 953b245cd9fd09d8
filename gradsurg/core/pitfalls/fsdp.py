"""fully_shard trains parts of parameters."""

from gradsurg.core.pitfalls.base import SHARDED, Cell, Pitfall


class Sharded(Pitfall):
    """`fully_shard` makes parameters DTensors, and computes with tensors gathered from them.

    Their gradients flow to the gathered tensors, are averaged, cut into parts, and written to
    `.grad`. Hooks of the parameters, which wait for gradients of DTensors, are not called. A part
    does not show the norm of the whole, and with another number of processes it is another part.

    >>> layer = fully_shard(nn.Linear(1, 1), mesh=init_device_mesh("cpu", (1,)))
    >>> handle = layer.weight.register_hook(lambda grad: print("called"))
    >>> layer(torch.ones(1, 1)).sum().backward()  # the hook is not called

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    cells = (
        Cell("FSDP2", SHARDED, TypeError).refused(
            "sharded parameters are DTensors, and their hooks do not run. Use Parameters with "
            "stage='step' or stage='accumulated', or Outputs, Inputs or Nodes."
        ),
        Cell("FSDP2", "Weights Updates MatchedUpdates", TypeError).refused(
            "sharded parameters are DTensors, of which each process holds a part. "
            "Train without fully_shard, for example with DistributedDataParallel."
        ),
        Cell("FSDP2, meshes", "Parameters", TypeError).refused(
            "use a mesh of one dimension, found parameters sharded over {ndim} dimensions."
        ),
        Cell("FSDP2, resumed", "Parameters", ValueError).refused(
            "resume with {made} processes: the state holds the parts of {made} processes, "
            "found {found} processes."
        ),
        Cell("FSDP2, accumulated", "Parameters", ValueError).refused(
            "the parameters are sharded: {reason}. Use stage='step'."
        ),
        Cell("FSDP2, aggregators", "SharedParameters", TypeError).refused(
            "{advice}, or use DistributedDataParallel in place of fully_shard: {reason}."
        ),
    )
