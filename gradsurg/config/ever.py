"""Whether a trigger could fire at any step of a run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gradsurg.config.culprits import inside, joined, parts
from gradsurg.config.make import ERRORS, sentence
from gradsurg.plugins.fields import Contradiction
from gradsurg.triggers.base import Decision, Trigger, TriggerContext


class Ever(Trigger):
    """Asks the trigger `of` about every step at every site, and lets nothing act itself."""

    def __init__(self, of: Trigger, steps: int) -> None:
        self.of = of
        self.steps = steps
        self.hit = False
        self.fault: tuple[str, str] | None = None

    @property
    def parts(self) -> Iterator[Trigger]:
        yield from self.of.parts

    def fires(self, context: TriggerContext) -> Decision:
        if context.site is None:
            return None
        if not self.hit and self.fault is None:
            try:
                self.hit = any(_could(self.of, context, step) for step in range(self.steps))
            except ERRORS as error:  # a trigger's own, told of its key
                self.fault = self._raising(context), sentence(error)
        return False

    def _raising(self, context: TriggerContext) -> str:
        for path, part in parts(self.of):
            try:
                _could(part, context, 0)
            except Contradiction as error:
                return joined(path, error.field)
            except ERRORS:  # it is the caller's already
                if not inside(part):
                    return path
        return ""


def _could(trigger: Trigger, context: TriggerContext, step: int) -> bool:
    """Whether it may fire at this step: what chance or the device decides may."""
    asked = Asked(
        replace(context.clock, step=step),
        context.seed,
        context.label,
        context.site,
        context.grad,
        context.value,
        dict(context.state),
    )
    return trigger.fires(asked) is not False or asked.drawn


@dataclass
class Asked(TriggerContext):
    """A context that knows whether chance was asked: another seed might have said otherwise."""

    drawn: bool = False

    def chance(self, *key: object) -> float:
        self.drawn = True
        return super().chance(*key)
