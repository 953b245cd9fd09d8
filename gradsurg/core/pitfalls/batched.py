"""One tensor stands for many gradients."""

from gradsurg.core.pitfalls.base import Pitfall


class Batched(Pitfall):
    """Under `vmap`, which `is_grads_batched` uses, a hook is called once for all gradients.

    It sees the shape of one of them, and cannot read values.

    >>> x = torch.ones(3, requires_grad=True)
    >>> handle = x.register_hook(lambda grad: print(tuple(grad.shape)))
    >>> torch.autograd.grad(2 * x, x, torch.eye(3), is_grads_batched=True)[0].shape
    (3,)
    torch.Size([3, 3])

    https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html
    """

    context, kinds = "is_grads_batched", "Captured"
    why = "it gets many gradients at once by is_grads_batched=True, and a transform takes one"
    instead = "Call torch.autograd.grad for each of them"


class OneState(Batched):
    """A state that is updated once would belong to none of the gradients."""

    context, kinds = "vmap", "*"
    why = "{transform} keeps one state for a site, which has many gradients at once there"
    instead = "Differentiate for each of them"
