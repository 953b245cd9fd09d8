"""torch.autograd.grad returns gradients and writes none."""

from gradsurg.core.pitfalls.base import RUNNING, Pitfall


class NothingAccumulated(Pitfall):
    """`torch.autograd.grad` leaves `.grad` as it is, and calls no hook after accumulation.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> handle = weight.register_post_accumulate_grad_hook(lambda weight: print("called"))
    >>> torch.autograd.grad(2 * weight, weight)  # the hook is not called
    (tensor([2.]),)

    https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html
    """

    context, kinds, outcome = "autograd.grad", f"{RUNNING} Parameters.step", "reported"
    why = "torch.autograd.grad does not write to .grad"
    instead = "Use stage='backward', or Captured"
