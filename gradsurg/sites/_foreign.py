"""The hooks of others that stand beside those of a surgery."""

from collections.abc import Iterable, Iterator


def foreign(*tables: object) -> list[str]:
    """The names of the hooks in PyTorch's hook tables that are not gradsurg's own."""
    return [
        f"{module}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
        for module, hook in _hooks(tables)
        if module.partition(".")[0] != "gradsurg"
    ]


def _hooks(tables: Iterable[object]) -> Iterator[tuple[str, object]]:
    for table in tables:
        for hook in list(table.values()) if isinstance(table, dict) else []:
            hook = getattr(hook, "func", hook)  # of a partial
            yield getattr(hook, "__module__", None) or type(hook).__module__, hook
