"""torch.autograd.grad returns gradients and writes none."""

from typing import ClassVar

from gradsurg.core.pitfalls.base import RUNNING, Pitfall, refused, reported


class NothingAccumulated(Pitfall):
    """`torch.autograd.grad` leaves `.grad` as it is, and calls no hook after accumulation.

    A mode that sees the calls of `torch.autograd.grad` holds in the thread that has entered it.

    >>> weight = torch.ones(1, requires_grad=True)
    >>> handle = weight.register_post_accumulate_grad_hook(lambda weight: print("called"))
    >>> torch.autograd.grad(2 * weight, weight)  # the hook is not called
    (tensor([2.]),)

    https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html
    """

    rows: ClassVar = {
        ("autograd.grad", f"{RUNNING} Parameters.step"): reported(
            "torch.autograd.grad does not write to .grad. Use stage='backward', or Captured."
        ),
        ("threads", "Captured"): reported(
            "the calls of torch.autograd.grad are seen in the thread of attach alone. "
            "Attach in the thread that calls it."
        ),
    }


class Batched(Pitfall):
    """Under `vmap`, which `is_grads_batched` uses, a hook is called once for all gradients.

    It sees the shape of one of them, and cannot read values. A state that is updated once would
    belong to none of them.

    >>> x = torch.ones(3, requires_grad=True)
    >>> handle = x.register_hook(lambda grad: print(tuple(grad.shape)))
    >>> torch.autograd.grad(2 * x, x, torch.eye(3), is_grads_batched=True)[0].shape
    (3,)
    torch.Size([3, 3])

    https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html
    """

    rows: ClassVar = {
        ("is_grads_batched", "Captured"): refused(
            "it gets many gradients at once by is_grads_batched=True, and a transform takes one. "
            "Call torch.autograd.grad for each of them."
        ),
        ("vmap", "*"): refused(
            "{transform} keeps one state for a site, which has many gradients at once there. "
            "Differentiate for each of them."
        ),
    }
