"""The extras of pyproject.toml, and the sentence that asks for one that is not installed."""

from importlib.util import find_spec

MODULES = {
    "run": ("polars", "altair", "vl_convert", "jinja2", "scipy", "filelock"),
}
"""The modules of an extra without which none of its features works."""


class MissingExtra(ImportError):
    """A feature needs an extra that is not installed."""


def how_to_install(name: str, extra: str) -> str:
    """Return the sentence that asks for an extra, because `name` is not installed."""
    return f"{name} is not installed: pip install 'gradsurg[{extra}]'"


def missing(extra: str, *modules: str) -> str:
    """Return the sentence that asks for an extra; empty if its modules are installed.

    `modules` are those that the caller uses, by default all of MODULES.
    """
    absent = (name for name in modules or MODULES[extra] if find_spec(name) is None)
    name = next(absent, "")
    return how_to_install(name, extra) if name else ""


def need(extra: str, *modules: str) -> None:
    """Raise MissingExtra, with the sentence of `missing`, if a module is not installed."""
    if sentence := missing(extra, *modules):
        raise MissingExtra(sentence)
