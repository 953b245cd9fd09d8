"""fully_shard trains parts of parameters."""

from typing import ClassVar

from gradsurg.core.pitfalls.base import SHARDED, Pitfall, refused


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

    rows: ClassVar = {
        ("FSDP2", f"{SHARDED} Buckets Captured"): refused(
            "sharded parameters are DTensors: autograd computes with other tensors, and their "
            "hooks do not run. Use Parameters with stage='step' or stage='accumulated' for the "
            "averaged gradient, or Outputs, Inputs or Nodes.",
            TypeError,
        ),
        ("FSDP2, meshes", "Parameters"): refused(
            "sharded over a mesh of {ndim} dimensions, needs one dimension.", TypeError
        ),
        ("FSDP2, resumed", "Parameters"): refused(
            "the surgery has the state of {made} processes, each with its part of the parameters; "
            "found {found} processes.",
            ValueError,
        ),
        ("FSDP2, accumulated", "Parameters"): refused(
            "the parameters are sharded, and {reason}. Use stage='step'.", ValueError
        ),
        ("FSDP2, aggregators", "SharedParameters"): refused(
            "the parameters are sharded, and {reason}. "
            "Use another aggregator, or DistributedDataParallel.",
            TypeError,
        ),
    }
