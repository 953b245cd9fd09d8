"""Hooks of C++ code replace those of Python."""

from collections.abc import Iterator

from torch import Tensor

from gradsurg.core.pitfalls.base import ENOUGH, AttachmentLike, Pitfall
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

    context, kinds, outcome = "hooks of C++ code", "Parameters.backward", "warned"
    why = (
        "a hook that C++ code registered on {names} has discarded the one here; since then "
        "gradients passed unchanged"
    )
    instead = "use stage='accumulated'"

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def step_ended(self, attachment: AttachmentLike) -> Iterator[str]:
        self._steps += 1
        if self._steps == ENOUGH:
            self.done.add("step_ended")
            yield from self.texts(attachment)

    def closed(self, attachment: AttachmentLike) -> Iterator[str]:
        yield from self.texts(attachment)

    @classmethod
    def texts(cls, attachment: AttachmentLike) -> Iterator[str]:
        """Yield a text for each intervention whose hooks were discarded."""
        named_params = attachment.model.named_parameters()
        params: dict[str, Tensor] = {name.replace("_orig_mod.", ""): p for name, p in named_params}
        for operation in attachment.operations:
            if operation.stage == "backward":
                named = {params[site]: site for site in operation.hooks if site in params}
                if names := ", ".join(named[param] for param in autograd.without_hooks(named)):
                    yield f"{operation.label}: {cls.sentences(names=names)}"
