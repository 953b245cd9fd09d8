"""The printed table of a model's module calls and selected sites."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

WIDTH = 120
MAX_NAMES = 40  # width of the name column above which names are shortened
MAX_CLASSES, MAX_OUTPUTS = 28, 40
HEADS = ("module#call", "class", "output", "params", "nodes")


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec | None":
        """Return None for a nested tensor, which has no shape."""
        return None if tensor.is_nested else cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return "x".join(map(str, self.shape)) or "()"


@dataclass(frozen=True, slots=True)
class SiteLine:
    """A site that a selector has asked for.

    `left_out` is the reason why no gradient will pass, `same_as` another site that stands for this
    one, `tensor` describes the tensor that passes, if it is known without a backward pass.
    """

    site: str
    tensor: TensorSpec | None = None
    left_out: str = ""
    same_as: str = ""

    @property
    def selected(self) -> bool:
        """Whether it is hooked under this name."""
        return not self.left_out and not self.same_as


@dataclass(frozen=True, slots=True)
class Row:
    """One call of a module, or a module that is never called (`call` is None).

    `depth` is the number of calls around it. `outputs` are the returned tensors with their paths.
    `num_params` counts the module's own parameters; `again` means that an earlier row lists them.
    `nodes` counts the autograd nodes made in the call by name; `no_grad` means that there are none
    because gradients were off.
    """

    name: str
    call: int | None
    depth: int
    kind: str
    outputs: tuple[tuple[str, TensorSpec | None], ...] = ()
    num_params: int = 0
    again: bool = False
    nodes: tuple[tuple[str, int], ...] = ()
    no_grad: bool = False
    site_lines: tuple[SiteLine, ...] = ()

    @property
    def label(self) -> str:
        """The beginning of the ids of its sites."""
        return self.name if self.call is None else f"{self.name}#{self.call}"


@dataclass(frozen=True, repr=False)
class Tree:
    """The module calls of a model in order, then the modules never called; prints as a table.

    `loose` are sites that belong to no module, `expected` is the required number of sites.
    """

    rows: tuple[Row, ...]
    num_params: int
    loose: tuple[SiteLine, ...] = ()
    selected: bool = False
    expected: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def site_lines(self) -> tuple[SiteLine, ...]:
        """All sites that the selector has asked for."""
        return tuple(line for row in self.rows for line in row.site_lines) + self.loose

    @property
    def sites(self) -> tuple[str, ...]:
        """The ids of the sites that would be hooked."""
        return tuple(line.site for line in self.site_lines if line.selected)

    def __str__(self) -> str:
        lines = [*_table(self.rows)]
        if self.loose:
            lines += ["  elsewhere:", *(_site_line(line, 1, 0) for line in self.loose)]
        return "\n".join([*lines, "", *_summary(self)])

    __repr__ = __str__


def plural(count: int, noun: str) -> str:
    """Return `1 site` or `2 sites`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each row and each of its sites; the margin marks selected sites."""
    short = max((2 * row.depth + len(row.label) for row in rows), default=0) > MAX_NAMES
    labels = _short_labels(rows) if short else [row.label for row in rows]
    cells = [
        (
            "  " * row.depth + label,
            _cut([row.kind], MAX_CLASSES),
            _cut([_shape(path, tensor) for path, tensor in row.outputs], MAX_OUTPUTS),
            _num_params(row),
        )
        for row, label in zip(rows, labels, strict=True)
    ]
    names, kinds, outputs, numbers = (
        max(map(len, column)) for column in zip(HEADS[:-1], *cells, strict=True)
    )
    room = max(WIDTH - names - kinds - outputs - numbers - 2 * len(HEADS), 24)

    def row_line(sign: str, name: str, kind: str, output: str, number: str, nodes: str) -> str:
        text = f"{sign:2}{name:{names}}  {kind:{kinds}}  {output:{outputs}}  {number:>{numbers}}"
        return f"{text}  {nodes}".rstrip()

    yield row_line("", *HEADS)
    calls = True
    for row, label, texts in zip(rows, labels, cells, strict=True):
        if calls and row.call is None:
            calls = False
            yield "  never called:"
        site_line = next(
            (line for line in row.site_lines if line.selected and line.site == label), None
        )
        nodes = [f"{name} x{count}" if count > 1 else name for name, count in row.nodes]
        yield row_line(
            "*" if site_line else "", *texts, "(no_grad)" if row.no_grad else _cut(nodes, room)
        )
        for line in row.site_lines:
            if line is not site_line:
                yield _site_line(line, row.depth + 1, names + 2 + kinds)


def _site_line(line: SiteLine, depth: int, width: int) -> str:
    where = "  " * depth + line.site
    if line.same_as:
        return f"= {where} is {line.same_as}"
    if line.left_out:
        return f"- {where}: {line.left_out}"
    return f"* {where:{width}}  {line.tensor or ''}".rstrip()


def _short_labels(rows: Sequence[Row]) -> list[str]:
    """Return the labels of the rows without the name of the calling module."""
    labels, around = [], list[str]()
    for row in rows:
        del around[row.depth :]
        caller = around[-1] if around else ""
        inside = caller and row.label.startswith(f"{caller}.")
        labels.append(row.label.removeprefix(caller) if inside else row.label)
        around.append(row.name)
    return labels


def _summary(tree: Tree) -> Iterator[str]:
    calls = sum(row.call is not None for row in tree.rows)
    nodes = sum(count for row in tree.rows for _, count in row.nodes)
    params = plural(tree.num_params, "parameter")
    yield f"{plural(calls, 'call')}, {params}, {plural(nodes, 'node')}"
    if tree.selected:
        number = len(tree.sites)
        text = f"{plural(number, 'site')} selected (*)"
        if tree.expected not in (None, number):
            text += f" where {tree.expected} are expected"
        left_out = sum(bool(line.left_out) for line in tree.site_lines)
        same = sum(bool(line.same_as) for line in tree.site_lines)
        text += f", {left_out} left out (-)" if left_out else ""
        text += f", {same} the same as another (=)" if same else ""
        yield text
    for note in tree.notes:
        yield f"note: {note}"


def _shape(path: str, tensor: TensorSpec | None) -> str:
    """Return the shape of an output, after its key if it has one."""
    if tensor is None:
        return path.lstrip(".") or "nested"
    keyed = not all(part.isdigit() for part in path.split(".")[1:])
    return f"{path[1:]} {tensor}" if keyed else str(tensor)


def _num_params(row: Row) -> str:
    """Return the number of parameters, in brackets if an earlier row lists them."""
    text = f"{row.num_params:,}" if row.num_params else ""
    return f"({text})" if text and row.again else text


def _cut(items: Sequence[str], width: int) -> str:
    """Join as many items as fit into the width, and the number of the others."""
    text = ", ".join(items)
    count = len(items)
    while len(text) > width and count > 1:
        count -= 1
        text = f"{', '.join(items[:count])}, +{len(items) - count} more"
    return text if len(text) <= width else f"{text[: width - 3]}..."
