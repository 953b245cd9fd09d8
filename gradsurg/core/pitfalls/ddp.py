"""DistributedDataParallel averages gradients in buckets, by hooks of its own."""

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from gradsurg.core.pitfalls.base import AttachmentLike, Cell, Pitfall
from gradsurg.torch_internals import autograd, compiling


class OneCommunicationHook(Pitfall):
    """A DistributedDataParallel takes one communication hook, which cannot be removed.

    The hook averages all parameters of a bucket alike. In the middle of a backward pass some
    buckets were averaged already. With `static_graph=True` a bucket waits for as many gradients as
    its parameters had in the first backward pass. A pass for one task has fewer.

    >>> model = DistributedDataParallel(nn.Linear(1, 1))
    >>> model.register_comm_hook(None, allreduce_hook)
    >>> model.register_comm_hook(None, allreduce_hook)
    Traceback (most recent call last):
    RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once.

    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    cells = (
        Cell("foreign communication hook", "Buckets").refused(
            "the model has the communication hook {hook} already, and can have only one. "
            "Use Parameters(stage='backward_end'), which acts on the averaged gradient."
        ),
        Cell("different averages", "Buckets", ValueError).refused(
            "give all Buckets of a model the same reduce, found {found} and {own}."
        ),
        Cell("attached in a backward pass", "Buckets").refused(
            "inside a backward pass some gradients are averaged already. Attach before it."
        ),
        Cell("static_graph", "SharedParameters").refused(
            "DistributedDataParallel(static_graph=True) averages the gradients of single tasks "
            "wrongly. Use static_graph=False."
        ),
    )


class BeforeAverage(Pitfall):
    """A hook of a parameter gets the gradient of its own process, before it is averaged.

    Unless a function is linear, the average of its results is not its result for the average.

    >>> grads = torch.tensor([3.0, -1.0])  # of two processes
    >>> grads.clamp(-1, 1).mean().item(), grads.mean().clamp(-1, 1).item()
    (0.0, 1.0)

    https://docs.pytorch.org/docs/stable/notes/ddp.html, "Internal Design".
    """

    cells = (
        Cell("DDP, not linear", "Parameters.backward Parameters.accumulated").warned(
            "it is not linear, and acts on the gradient of each of {processes} processes. "
            "Use stage='backward_end' or stage='step' to transform their average."
        ),
    )

    def attached(self, attachment: AttachmentLike) -> None:
        if attachment.processes == 1:
            return
        for module in attachment.model.modules():
            self._note(attachment, module)

        @compiling.untraced
        def ended(module: nn.Module, args: object, output: object) -> None:
            self._note(attachment, autograd.active_ddp())  # the wrapper around the attached model

        self.stack.close()  # removes the hook of the last call: each change calls `attached` again
        self.stack.callback(attachment.model.register_forward_hook(ended).remove)

    def _note(self, attachment: AttachmentLike, module: nn.Module | None) -> None:
        if not isinstance(module, DistributedDataParallel):
            return
        processes = distributed.get_world_size(module.process_group)
        for operation in attachment.operations if processes > 1 else ():
            if operation.intervention.differs_from_average:
                operation.note(self.text("DDP, not linear", processes=processes))
