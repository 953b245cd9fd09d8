"""A NaN stays in a running mean."""

from collections.abc import Iterator

import torch
from torch import Tensor

from gradsurg.core.pitfalls.base import AttachmentLike, Cell, Pitfall
from gradsurg.triggers.base import WHEN


class NanStates(Pitfall):
    """One NaN in a gradient stays in a mean over steps, even if a GradScaler skips the step.

    >>> mean = torch.zeros(1)
    >>> for grad in (1.0, float("nan"), 1.0): mean = 0.9 * mean + 0.1 * grad
    >>> mean
    tensor([nan])
    """

    cells = (
        Cell("NaN in a state", "*").warned(
            "put Sanitize before {transform}, to remove NaN from its gradients: the state of "
            "{transform} at {sites} holds a NaN, seen at step {step}"
        ),
    )

    def closed(self, attachment: AttachmentLike) -> Iterator[str]:
        for operation in attachment.operations:
            transforms = dict(zip(operation.labels, operation.intervention.links, strict=True))
            tensors = [
                (key, tensor)
                for key, state in attachment.states.items()
                if key.partition("/")[0] in transforms and not key.endswith(WHEN)
                for tensor in state.values()
                if type(tensor) is Tensor and not tensor.is_meta  # a FakeTensor has no values
            ]
            if not tensors:
                continue
            # Read together, to synchronize with the device once.
            device = tensors[0][1].device
            flags = torch.stack([tensor.isnan().any().to(device) for _, tensor in tensors]).tolist()
            has_nan = zip(tensors, flags, strict=True)
            if not (spoilt := [*dict.fromkeys(key for (key, _), flag in has_nan if flag)]):
                continue
            label, _, site = spoilt[0].partition("/")
            sites = f"{site} and {len(spoilt) - 1} more" if spoilt[1:] else site
            name, step = type(transforms[label]).__name__, attachment.clock.step
            text = self.text("NaN in a state", transform=name, sites=sites, step=step)
            yield f"{operation.label}: {text}"
