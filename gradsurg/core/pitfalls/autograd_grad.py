"""torch.autograd.grad returns gradients and writes none."""

from gradsurg.core.pitfalls.base import RUNNING, Cell, Pitfall


class FunctionalGradients(Pitfall):
    """`torch.autograd.grad` leaves `.grad` as it is, and calls no hook after accumulation.

    A mode that sees its calls holds in the thread that has entered it. Under `vmap`, which
    `is_grads_batched` uses, a hook is called once for all gradients. It sees the shape of one of
    them, and a state that is updated once would belong to none.

    >>> x = torch.ones(3, requires_grad=True)
    >>> first = x.register_hook(lambda grad: print(tuple(grad.shape)))
    >>> last = x.register_post_accumulate_grad_hook(lambda x: print("not called"))
    >>> torch.autograd.grad(2 * x, x, torch.eye(3), is_grads_batched=True)[0].shape
    (3,)
    torch.Size([3, 3])

    https://docs.pytorch.org/docs/stable/generated/torch.autograd.grad.html
    """

    cells = (
        Cell("autograd.grad", f"{RUNNING} Parameters.step").reported(
            "torch.autograd.grad does not write to .grad. Use stage='backward', or Captured."
        ),
        Cell("threads", "Captured").reported(
            "calls of torch.autograd.grad are seen only in the thread that called attach. "
            "Attach in the thread that calls it."
        ),
        Cell("is_grads_batched", "Captured").refused(
            "with is_grads_batched=True there are many gradients at once, and a transform takes "
            "one. Call torch.autograd.grad for each gradient."
        ),
        Cell("vmap", "*").refused(
            "{transform} keeps one state for each site, and vmap or is_grads_batched computes "
            "many gradients of it at once. Compute them one by one."
        ),
    )
