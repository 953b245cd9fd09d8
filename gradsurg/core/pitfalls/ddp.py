"""DistributedDataParallel averages gradients in buckets, by hooks of its own."""

from typing import ClassVar

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gradsurg.core.pitfalls.base import AttachmentLike, Pitfall, refused, warned
from gradsurg.torch_internals import autograd


class OneCommunicationHook(Pitfall):
    """A DistributedDataParallel takes one communication hook, which cannot be removed.

    It averages a whole bucket in one way. In the middle of a backward pass some buckets were
    averaged already. With `static_graph=True` a bucket waits for as many gradients as its
    parameters had in the first backward pass; those of a pass for one task are fewer.

    >>> model = DistributedDataParallel(nn.Linear(1, 1))
    >>> model.register_comm_hook(None, allreduce_hook)
    >>> model.register_comm_hook(None, allreduce_hook)
    Traceback (most recent call last):
    RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once.

    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    rows: ClassVar = {
        ("foreign communication hook", "Buckets"): refused(
            "the model has the communication hook {hook} already, and can have only one. "
            "Use Parameters with stage='backward_end', which acts after it."
        ),
        ("different averages", "Buckets"): refused(
            "all of a model need the same reduce, found {found} and {own}.",
            ValueError,
        ),
        ("attached in a backward pass", "Buckets"): refused(
            "cannot be attached inside a backward pass, as DistributedDataParallel would average "
            "some gradients wrongly. Attach before it."
        ),
        ("static_graph", "SharedParameters"): refused(
            "an aggregator runs backward passes for single tasks, which "
            "DistributedDataParallel(static_graph=True) does not average correctly. "
            "Use static_graph=False."
        ),
    }


class BeforeAverage(Pitfall):
    """A hook of a parameter gets the gradient of its own process, before it is averaged.

    Unless a function is linear, the average of its results is not its result for the average.

    >>> grads = torch.tensor([3.0, -1.0])  # of two processes
    >>> grads.clamp(-1, 1).mean().item(), grads.mean().clamp(-1, 1).item()
    (0.0, 1.0)

    https://docs.pytorch.org/docs/stable/notes/ddp.html, "Internal Design".
    """

    rows: ClassVar = {
        ("DDP, not linear", "Parameters.backward Parameters.accumulated"): warned(
            "it acted on the gradients of each of {processes} processes, before "
            "DistributedDataParallel averaged them, and the transform is not linear: acting on "
            "each is not acting on their average. "
            "For the average use stage='backward_end' or stage='step'."
        ),
    }

    def attached(self, attachment: AttachmentLike) -> None:
        if attachment.processes > 1:
            for module in attachment.modules:
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
                operation.note(self.text("DDP, not linear", processes=processes))
