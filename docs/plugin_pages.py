"""Pages of the API, written when the documentation is built; `docs/conf.py` calls `write`.

Each transform, aggregator, site and trigger has a page with its signature, docstring, fields, uses
and presets. Four pages list them, one has the other names of `dir(gradsurg)`, one the base classes.
The docstrings of the four kinds are read as Markdown.
"""

import ast
import inspect
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

import gradsurg
from gradsurg.experiment import catalogue
from gradsurg.experiment.catalogue import Entry
from gradsurg.plugins.registry import CONFIG_DIR, GROUPS, PACKAGE, find, names

GALLERY = Path(__file__).parent / "gallery"
KINDS = {
    "transforms": "A transform maps a gradient to a gradient. [All properties](../transforms.md)",
    "aggregators": "An aggregator combines the gradients of several losses. "
    "[Several losses](../several_losses.md), [all properties](../aggregators.md)",
    "sites": "A site selector chooses the tensors and the hook. [All sites](../sites.md)",
    "triggers": "A trigger chooses when a transform acts. [All triggers](../triggers.md)",
}
"""Folder of classes: the introduction of the page that lists them."""

COMMON_FIELDS = {
    "per": "One number for the whole `tensor`, for each `unit` (index of axis 0) or `entry`, or an "
    "einops pattern: `o i kh kw -> o` keeps the axis `o` apart.",
    "pattern": "A glob or `re:` pattern on the name; for `Nodes` on the kind of operation.",
    "types": "A glob or `re:` pattern on the class of the module, or on one of its bases.",
    "depth": "The nesting depth of the module: a number or a pair (lowest, highest).",
    "index": "The last number in the name of the module: a number or a pair (lowest, highest).",
    "ndim": "The number of axes of the parameter: a number or a pair (lowest, highest).",
    "size": "The number of entries of the parameter: a number or a pair (lowest, highest).",
    "call": "The number of the call of the module within one call of the model; None is each.",
    "stage": "The [stage](../sites.md#stages) at which it acts; None is the default.",
    "source": "The tensor: `grad`, `value`, `batch`, `input:<module>` or `output:<module>`.",
    "preference": "One number for each task; None is the same for all.",
}
"""Meanings of fields that several classes share."""

BASE_CLASSES = {
    "transforms.base.Transform": "transforms",
    "transforms.base.Stateless": "transforms",
    "transforms.base.GroupTransform": "transforms",
    "transforms.base.TransformContext": "transforms",
    "plugins.fields.validated": "transforms",
    "aggregators.base.Aggregator": "aggregators",
    "aggregators.base.LossWeighting": "aggregators",
    "aggregators.base.Weighting": "aggregators",
    "aggregators.base.GramianAggregator": "aggregators",
    "aggregators.base.Entrywise": "aggregators",
    "aggregators.base.AggregatorContext": "aggregators",
    "Trigger": "triggers",
    "tasks.base.Task": "tasks",
    "tasks.base.Data": "tasks",
}
"""Classes to subclass, and what their methods get: the section of each."""

ORPHAN = "---\norphan: true\n---"
"""Keeps a page out of the sidebar, whose length is the build time of every page."""

SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def write(folder: Path) -> None:
    """Write the pages into a folder, which is emptied first."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for stem, text in pages().items():
        (folder / f"{stem}.md").write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the Markdown text of each page by its stem."""
    plugins = {stem: plugin_page(kind, stem) for kind in KINDS for stem in names(kind)}
    lists = {kind: list_page(kind) for kind in KINDS}
    return {**plugins, **lists, "surgery": surgery_page(), "base_classes": base_classes_page()}


def list_page(kind: str) -> str:
    """Return the page that lists the classes of a kind and their presets."""
    stems = names(kind)
    rows = [["class", "purpose", "presets"]]
    for stem in stems:
        own, *presets = entries_of(kind, stem)
        name = f"[`gs.{find(kind, stem).__name__}`]({stem}.md)"
        links = [f"[`{one.name}`]({stem}.md#{one.name})" for one in presets]
        rows.append([name, own.summary, ", ".join(links)])
    head = f"# {kind.capitalize()}: all {len(stems)} classes\n\n{KINDS[kind]}."
    return "\n\n".join([head, table(rows), ""])


def plugin_page(kind: str, stem: str) -> str:
    """Return the page of a transform, an aggregator, a site or a trigger."""
    cls = find(kind, stem)
    own, *presets = entries_of(kind, stem)
    parts = [ORPHAN, f"# {cls.__name__}: {own.summary}", f"One of the [{kind}]({kind}.md)."]
    parts += [described(cls), *picture(own), facts(kind, own)]
    fields = field_rows(cls, own)
    parts += ["## Fields", table(fields)] if len(fields) > 1 else []
    parts += ["## Use", *use(kind, own)]
    parts += ["## Presets"] if presets else []
    for preset in presets:
        paper = f" {cited(preset)}." if preset.paper else ""
        code = f"`{call(preset.fields)}`"
        text = f"{preset.summary}.{paper} The preset is {code}.{also(preset)}"
        parts += [f"### {preset.name}", text, *picture(preset), *use(kind, preset)]
    return "\n\n".join([*parts, ""])


def entries_of(kind: str, stem: str) -> list[Entry]:
    """Return the catalogue's entries of a class: its own, then its presets."""
    group = entries(GROUPS[kind])
    own = [one for one in group if one.name == stem]
    return own + [one for one in group if one.preset_of == stem]


entries = cache(catalogue.list)


def described(cls: type) -> str:
    """Return the entry of a class: its signature in Python and its docstring."""
    home = f"{cls.__module__}.{cls.__name__}"
    head = [f"`````{{py:class}} gs.{cls.__name__}{signature_of(cls)}", f":canonical: {home}"]
    return "\n".join([*head, "", linked_names(docstring(cls), cls.__name__), "`````"])


def signature_of(cls: type) -> str:
    """Return the parameters of a class with their defaults, without annotations."""
    signature = inspect.signature(cls)
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def docstring(cls: type) -> str:
    """Return the docstring of a class, with links to arXiv and its examples as blocks of code."""
    text = inspect.getdoc(cls) or ""
    text = re.sub(r"^>>> (?s:.+?)(?=\n\n|\Z)", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)
    return re.sub(r"arXiv\s(\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def linked_names(text: str, own_name: str) -> str:
    """Return a text with links at the names of other classes that have a page."""
    stems = stems_by_class()

    def link(match: re.Match[str]) -> str:
        name = match[1]
        known = name in stems and name != own_name
        return f"[`{name}`]({stems[name]}.md)" if known else match[0]

    return re.sub(r"`(\w+)`", link, text)


@cache
def stems_by_class() -> dict[str, str]:
    """Return the page of each class by its name."""
    return {find(kind, stem).__name__: stem for kind in KINDS for stem in names(kind)}


def facts(kind: str, entry: Entry) -> str:
    """Return the paper, properties, stages and file of an entry as a list."""
    lines = [f"- Paper: {cited(entry)}"] if entry.paper else []
    words = ", ".join(key.replace("_", " ") for key in entry.properties)
    lines += [f"- [Properties](../{kind}.md#properties): {words}"] if words else []
    lines += [f"- Needs besides the gradient: {', '.join(entry.needs)}"] if entry.needs else []
    stages = ", ".join(f"`{stage}`" for stage in entry.stages)
    lines += [f"- [Stages](../sites.md#stages): {stages}"] if stages else []
    lines += [f"- Other words for it: {', '.join(entry.also)}"] if entry.also else []
    module = entry.target.rpartition(".")[0].replace(".", "/")
    return "\n".join([*lines, f"- Source: `{module}.py`"])


def cited(entry: Entry) -> str:
    """Return the paper of an entry, with a link if it has one."""
    return f"[{entry.paper}]({entry.url})" if entry.url else entry.paper


def also(entry: Entry) -> str:
    """Return a sentence with other words for an entry."""
    return f" Other words for it: {', '.join(entry.also)}." if entry.also else ""


def picture(entry: Entry) -> list[str]:
    """Return the picture of the gallery, if there is one."""
    name = f"{entry.group}_{entry.name}.png"
    if not (GALLERY / name).is_file():
        return []
    options = [f":alt: effect of {entry.name} on gradients", ":width: 320px"]
    options += [":target: ../../gallery.html"]
    return ["\n".join([f"```{{image}} ../../gallery/{name}", *options, "```"])]


def use(kind: str, entry: Entry) -> list[str]:
    """Return the command of an entry and the code for a training loop."""
    if kind == "aggregators":
        loop = (
            "with surgery.attach(model, optimizer) as live:\n"
            "    live.backward(losses)  # a list or a dict, in place of loss.backward()\n"
            "    optimizer.step()"
        )
    else:
        loop = "with surgery.attach(model, optimizer):\n    ...  # your training loop"
    code = f"import gradsurg as gs\n\nsurgery = {surgery_of(entry.command)}\n{loop}"
    return [f"```sh\n{entry.command}\n```", f"```python\n{code}\n```"]


def surgery_of(command: str) -> str:
    """Return the Python expression of the surgery of a command.

    >>> surgery_of("python -m gradsurg.run transform=clip transform.clip.value=0.1")
    'gs.Surgery(gs.Intervention(gs.Clip(0.1), at=gs.Parameters()))'
    """
    words = [word.lstrip("+").partition("=") for word in shlex.split(command)[3:]]
    given = {key: value for key, _, value in words}
    if "aggregator" in given:
        parts = [part_of("aggregators", given), "at=gs.SharedParameters()"]
    else:
        parts = [part_of("transforms", given), f"at={part_of('sites', given)}"]
    is_timed = any(key.partition(".")[0] == "when" for key in given)
    parts += [f"when={part_of('triggers', given)}"] if is_timed else []
    line = f"gs.Surgery(gs.Intervention({', '.join(parts)}))"
    if len(line) <= 80:
        return line
    lines = ["gs.Surgery(", "    gs.Intervention(", *(f"        {part}," for part in parts)]
    return "\n".join([*lines, "    )", ")"])


def part_of(kind: str, given: Mapping[str, str]) -> str:
    """Return the Python expression of one part of the surgery of a command."""
    group = GROUPS[kind]
    name = given.get(group) or {"site": "parameters", "when": "steps"}[group]
    fields = next(deepcopy(one.fields) for one in entries(group) if one.name == name)
    prefix = f"{group}.{name}." if group == "transform" else f"{group}."
    changed = {key.removeprefix(prefix): given[key] for key in given if key.startswith(prefix)}
    for key, value in changed.items():
        *folders, last = key.split(".")
        place = fields
        for folder in folders:
            place = place[folder]
        place[last] = parsed(value)
    return call(fields, changed)


def parsed(value: str) -> Any:  # Any: what a yaml file can hold
    """Return the value of an override."""
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:  # a pattern, as *.weight
        return value


def call(fields: Mapping[str, Any], shown: Collection[str] = ()) -> str:
    """Return the Python expression of an object with the fields of a yaml file.

    Fields that have the default of the class are left out, unless their name is in `shown`.
    """
    cls = getattr(gradsurg, fields["_target_"].removeprefix("gradsurg."))
    arguments = []
    for place, one in enumerate(inspect.signature(cls).parameters.values()):
        if one.name not in fields:
            continue
        value = fields[one.name]
        value = tuple(value) if isinstance(value, list) else value
        if value != one.default or one.name in shown:
            is_positional = place == 0 and one.kind is one.POSITIONAL_OR_KEYWORD
            arguments.append(f"{'' if is_positional else f'{one.name}='}{literal(value)}")
    return f"gs.{cls.__name__}({', '.join(arguments)})"


def literal(value: Any) -> str:  # Any: what a yaml file can hold
    """Return the Python expression of a value of a yaml file."""
    match value:
        case {"_target_": _}:
            return call(value)
        case list() | tuple():
            items = [literal(item) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        case str():
            return json.dumps(value, ensure_ascii=False)
        case _:
            return repr(value)


def field_rows(cls: type, entry: Entry) -> list[list[str]]:
    """Return the table of the fields of a class: type, bounds, default and meaning."""
    rows = [["field", "type", "bounds", "default", "meaning"]]
    comments = yaml_comments(entry)
    plain, checked = get_type_hints(cls), get_type_hints(cls, include_extras=True)  # with bounds
    for one in inspect.signature(cls).parameters.values():
        is_stage = one.name == "stage" and entry.stages
        is_field = one.annotation == plain.get(one.name)
        given = checked[one.name] if is_field else one.annotation
        kind = Literal[tuple(entry.stages)] | None if is_stage else given
        star = "*" if one.kind is one.VAR_POSITIONAL else ""
        default = "required" if one.default is one.empty else f"`{one.default!r}`"
        text = meaning(cls, one.name) or comments.get(one.name, "")
        if one.name in COMMON_FIELDS and get_origin(one.annotation) is not Literal:
            text = COMMON_FIELDS[one.name]
        cells = [type_text(kind), ", ".join(bounds(kind)), "" if star else default, text]
        rows.append([f"`{star}{one.name}`", *cells])
    return rows


def type_text(annotation: Any) -> str:  # Any: an annotation
    """Return an annotation as a text: `float or None`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(args[0])
    if origin is Literal:
        return " or ".join(f'`"{choice}"`' for choice in args)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(type_text, args)))
    if origin in (Callable, type):
        return "function" if origin is Callable else "class"
    if origin is not None:
        items = dict.fromkeys(type_text(one) for one in args if one is not Ellipsis)
        return f"{origin.__name__} of {' or '.join(items)}"
    return {NoneType: "None", Any: "any"}.get(annotation) or annotation.__name__


def bounds(annotation: Any) -> list[str]:  # Any: an annotation
    """Return the bounds that the annotation of a field sets: `> 0`."""
    texts = []
    for item in getattr(annotation, "__metadata__", ()):
        for rule in getattr(item, "metadata", ()):
            keys = [key for key in SIGNS if hasattr(rule, key)]
            texts += [f"{SIGNS[key]} {getattr(rule, key)}" for key in keys]
            texts += ["not empty"] if hasattr(rule, "min_length") else []
            texts += ["or `inf`"] if getattr(rule, "allow_inf_nan", False) else []
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return texts
    args = args[:1] if origin is Annotated else args
    inner = [text for one in args for text in bounds(one)]
    return texts + ([f"each {text}" for text in inner] if origin is tuple else inner)


def meaning(cls: type, name: str) -> str:
    """Return the item, else the sentence of a docstring that explains a field."""
    parts = [part for part in (inspect.getdoc(cls) or "").split("\n\n") if part[:3] != ">>>"]
    tables = [part for part in parts if part.startswith("|")]
    prose = [re.sub(r"\s+", " ", part) for part in parts if part not in tables]
    items = [item for part in prose for item in re.split(r"(?:^| )- (?=`)", part)[1:]]
    for item in items:
        if item.startswith(f"`{name}`"):
            return sentence(item.partition(";")[0].removeprefix(f"`{name}`: "))
    sentences = [one for part in prose for one in re.split(r"(?<=[^ ][.;]) (?=[A-Z`])", part)]
    for pattern in (rf"`{name}`", rf"`{name}=", rf"\b{name}\b"):
        found = [one for one in sentences if re.search(pattern, one)]
        in_table = any(re.search(pattern, one) for one in tables)
        if found and not (in_table and len(name) == 1):
            return sentence(found[0])
        if in_table:
            return "See the table above."
    return ""


def sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    end = "" if text.endswith(".") else "."
    return f"{text[0].upper()}{text[1:].rstrip(';:')}{end}"


def yaml_comments(entry: Entry) -> dict[str, str]:
    """Return the comments beside the fields in the yaml file of an entry."""
    text = (CONFIG_DIR / entry.group / f"{entry.name}.yaml").read_text(encoding="utf-8")
    return dict(re.findall(r"^ *(\w+): .*?  # (.*)$", text, re.MULTILINE))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, whose first row is the head."""
    head, *others = rows
    lines = [head, ["---"] * len(head), *others]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def surgery_page() -> str:
    """Return the page of the names in `dir(gradsurg)` that are no plug-ins, and of its modules."""
    elsewhere = {*stems_by_class(), *BASE_CLASSES, "__version__"}
    given = {name: getattr(gradsurg, name) for name in dir(gradsurg) if name not in elsewhere}
    modules = [one for one in given.values() if isinstance(one, ModuleType)]
    classes = [f"gradsurg.{name}" for name, one in given.items() if isinstance(one, type)]
    functions = [f"gradsurg.{name}" for name, one in given.items() if inspect.isroutine(one)]
    parts = ["# Surgery: the other names of gradsurg", "## Classes", automatic(classes)]
    parts += ["## Functions", automatic(functions)]
    modules.remove(gradsurg.integrations)  # its modules import other libraries
    for module in modules:
        if members := public(module):
            parts += [f"## {module.__name__}", automatic(members)]
    for name in dir(gradsurg.integrations):
        parts += [f"## gradsurg.integrations.{name}", *unimported(f"gradsurg.integrations.{name}")]
    return "\n\n".join([*parts, ""])


def public(module: ModuleType) -> list[str]:
    """Return the dotted names of the public classes and functions of a module."""
    own = [name for name in getattr(module, "__all__", dir(module)) if name[0] != "_"]
    homes = {name: getattr(getattr(module, name), "__module__", "") for name in own}
    return [
        f"{module.__name__}.{name}"
        for name, home in homes.items()
        if home.startswith(module.__name__)
        and f"{home}.{name}".removeprefix("gradsurg.") not in BASE_CLASSES
    ]


def unimported(module: str) -> Iterator[str]:
    """Yield the entries of the classes of a module that imports another library, from its text."""
    path = PACKAGE.parent / f"{module.replace('.', '/')}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            made = next(arguments_of(one) for one in methods if one.name == "__init__")
            head = f"````{{py:class}} {module}.{node.name}({made})"
            lines = [head, "", ast.get_docstring(node) or "", ""]
            for one in methods:
                if one.name[0] != "_" and (doc := ast.get_docstring(one)):
                    lines += [f"```{{py:method}} {one.name}({arguments_of(one)})", "", doc, "```"]
            yield "\n".join([*lines, "````"])


def arguments_of(method: ast.FunctionDef) -> str:
    """Return the parameters of a method without `self`, as they are written."""
    return re.sub(r"^self(, )?", "", ast.unparse(method.args))


def base_classes_page() -> str:
    """Return the page of the classes to subclass."""
    parts = ["# Base classes: transforms, aggregators, triggers and tasks of your own"]
    for section in dict.fromkeys(BASE_CLASSES.values()):
        parts.append(f"## {section.capitalize()}")
        parts.append(automatic([f"gradsurg.{k}" for k, v in BASE_CLASSES.items() if v == section]))
    return "\n\n".join([*parts, ""])


def automatic(paths: Sequence[str]) -> str:
    """Return the directives that make Sphinx read the docstrings of classes and functions."""
    lines = []
    for path in paths:
        is_class = path.rpartition(".")[2][0].isupper()
        lines += [f".. auto{'class' if is_class else 'function'}:: {path}"]
        lines += ["   :members:"] * is_class + [""]
    return "\n".join(["```{eval-rst}", *lines, "```"])


def restructured(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a docstring with its Markdown tables as those of reStructuredText."""
    inside = False
    for line in lines:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not line.startswith("| "):
            if not line.startswith("|--"):
                inside = False
                yield line
            continue
        if not inside:
            yield from (".. list-table::", "   :header-rows: 1", "")
        inside = True
        yield from (f"   {'*' if place == 0 else ' '} - {cell}" for place, cell in enumerate(cells))
