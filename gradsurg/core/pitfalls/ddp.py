"""DistributedDataParallel averages gradients in buckets, by hooks of its own."""

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gradsurg.core.pitfalls.base import AttachmentLike, Pitfall
from gradsurg.torch_internals import autograd


class OneCommunicationHook(Pitfall):
    """A DistributedDataParallel takes one communication hook, which cannot be removed.

    >>> model = DistributedDataParallel(nn.Linear(1, 1))
    >>> model.register_comm_hook(None, allreduce_hook)
    >>> model.register_comm_hook(None, allreduce_hook)
    Traceback (most recent call last):
    RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once.

    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """

    context, kinds = "foreign communication hook", "Buckets"
    why = "the model has the communication hook {hook} already, and can have only one"
    instead = "Use Parameters with stage='backward_end', which acts after it"


class OneAverage(OneCommunicationHook):
    """That hook averages a whole bucket in one way."""

    context, error = "different averages", ValueError
    why = "all of a model need the same reduce, found {found} and {own}"
    instead = ""


class HalfAPass(OneCommunicationHook):
    """In the middle of a backward pass some buckets were averaged already."""

    context = "attached in a backward pass"
    why = (
        "cannot be attached inside a backward pass, as DistributedDataParallel would average some "
        "gradients wrongly"
    )
    instead = "Attach before it"


class StaticGraph(Pitfall):
    """With `static_graph=True` buckets are averaged after the number of gradients that parameters
    had in the first backward pass; those of a pass for one task are fewer.

    >>> model = DistributedDataParallel(nn.Linear(1, 1), static_graph=True)
    >>> model.static_graph
    True

    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    context, kinds = "static_graph", "SharedParameters"
    why = (
        "an aggregator runs backward passes for single tasks, which "
        "DistributedDataParallel(static_graph=True) does not average correctly"
    )
    instead = "Use static_graph=False"


class BeforeAverage(Pitfall):
    """A hook of a parameter gets the gradient of its own process, before it is averaged.

    Unless a function is linear, the average of its results is not its result for the average.

    >>> grads = torch.tensor([3.0, -1.0])  # of two processes
    >>> grads.clamp(-1, 1).mean().item(), grads.mean().clamp(-1, 1).item()
    (0.0, 1.0)

    https://docs.pytorch.org/docs/stable/notes/ddp.html, "Internal Design".
    """

    context, outcome = "DDP, not linear", "warned"
    kinds = "Parameters.backward Parameters.accumulated"
    why = (
        "it acted on the gradients of each of {processes} processes, before "
        "DistributedDataParallel averaged them, and the transform is not linear: acting on each is "
        "not acting on their average"
    )
    instead = "For the average use stage='backward_end' or stage='step'"

    def attached(self, attachment: AttachmentLike) -> None:
        if attachment.processes > 1:
            for module in attachment.model.modules():
                self._note(attachment, module)

    def forward_ended(self, attachment: AttachmentLike, output: object) -> None:
        if attachment.processes > 1:
            self._note(attachment, autograd.active_ddp())

    def _note(self, attachment: AttachmentLike, module: nn.Module | None) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        processes = distributed.get_world_size(module.process_group)
        for operation in attachment.operations if processes > 1 else ():
            if operation.intervention.differs_from_average:
                operation.note(self.sentences(processes=processes))
