"""Hooks of C++ code replace those of Python."""

from collections.abc import Iterator

from torch import Tensor

from gradsurg.core.pitfalls.base import AttachmentLike, Cell, Operation, Pitfall
from gradsurg.plugins.messages import shortened
from gradsurg.torch_internals import autograd


class DiscardedHooks(Pitfall):
    """`Tensor::register_hook` of C++ on a parameter discards the hooks that Python has registered.

    They stay in the table of the parameter, and are not called. Backward passes say nothing.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> handle = weight.register_hook(lambda grad: print("called"))
    >>> weight.backward()  # not called after such a registration
    called

    https://docs.pytorch.org/cppdocs/api/classat_1_1_tensor.html, `register_hook`.
    """

    cells = (
        Cell("hooks of C++ code", "Parameters.backward").warned(
            "C++ code has registered a hook on {names}, which discards gradsurg's: gradients pass "
            "unchanged. Use stage='accumulated'."
        ),
    )

    def first_steps_ended(self, attachment: AttachmentLike) -> Iterator[str]:
        for operation in attachment.operations:
            if operation.stage != "backward":
                continue
            sites = self._overdue(attachment, operation)
            if sites and (discarded := set(autograd.without_hooks(sites))):
                names = shortened(name for param, name in sites.items() if param in discarded)
                yield f"{operation.label}: {self.text('hooks of C++ code', names=names)}"

    closed = first_steps_ended

    def _overdue(self, attachment: AttachmentLike, operation: Operation) -> dict[Tensor, str]:
        """The parameters whose hooks did not act when they should have, with their sites.

        A probe of all parameters would cost as much as attaching. Left out are parameters whose
        hook acted in the last step, or, where no steps are counted, those without a gradient.
        """
        step, is_counted = attachment.clock.step, attachment.clock.step != attachment.first_step
        return {
            param: name
            for (name, *_), param, _ in attachment.params_of(attachment.model)
            if (hook := operation.hooks.get(name)) is not None
            and (hook.contexts[0].step < step - 1 if is_counted else param.grad is not None)
        }
