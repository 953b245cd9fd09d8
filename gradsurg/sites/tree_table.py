"""The printed table of a model's module calls and selected sites."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradsurg.sites.places import call_id

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
    one. `tensor` describes the tensor that passes, if it is known without a backward pass.
    """

    site: str
    tensor: TensorSpec | None = None
    left_out: str = ""
    same_as: str = ""

    @property
    def selected(self) -> bool:
        """Whether it is hooked under this name."""
        return not self.left_out and not self.same_as

    def line(self, depth: int, width: int) -> str:
        """Return the line in the table, with the tensor after `width` columns."""
        where = "  " * depth + self.site
        if self.same_as:
            return f"= {where} is {self.same_as}"
        if self.left_out:
            return f"- {where}: {self.left_out}"
        return f"* {where:{width}}  {self.tensor or ''}".rstrip()


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
        return self.name if self.call is None else call_id(self.name, self.call)

    def cells(self, label: str) -> tuple[str, str, str, str]:
        """Return the texts of all columns except the nodes."""
        number = f"{self.num_params:,}" if self.num_params else ""
        return (
            "  " * self.depth + label,
            _cut([self.kind], MAX_CLASSES),
            _cut([_shape(path, tensor) for path, tensor in self.outputs], MAX_OUTPUTS),
            f"({number})" if number and self.again else number,
        )


@dataclass(frozen=True, repr=False)
class Tree:
    """The module calls of a model in order, then the modules never called; prints as a table.

    `loose` are sites that belong to no module, `expected` is the required number of sites,
    `changes` the tensors that a transform changes there; empty without a selector.
    """

    rows: tuple[Row, ...]
    num_params: int
    loose: tuple[SiteLine, ...] = ()
    changes: str = ""
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
            lines += ["  elsewhere:", *(line.line(1, 0) for line in self.loose)]
        return "\n".join([*lines, "", *_summary(self)])

    __repr__ = __str__


def plural(count: int, noun: str) -> str:
    """Return `1 site` or `2 sites`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each row and each of its sites; the margin marks selected sites."""
    labels = [row.label for row in rows]
    if max((2 * row.depth + len(row.label) for row in rows), default=0) > MAX_NAMES:
        labels = _short_labels(rows)
    cells = [HEADS[:-1], *(row.cells(label) for row, label in zip(rows, labels, strict=True))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = max(WIDTH - sum(widths) - 2 * len(HEADS), 24)

    def line(sign: str, texts: Sequence[str], nodes: str) -> str:
        *left, number = (f"{text:{width}}" for text, width in zip(texts, widths, strict=True))
        return "  ".join(
            [f"{sign:2}{left[0]}", *left[1:], f"{number.strip():>{widths[-1]}}", nodes]
        )

    yield line("", cells[0], HEADS[-1])
    called = True
    for row, label, texts in zip(rows, labels, cells[1:], strict=True):
        if called and row.call is None:
            called = False
            yield "  never called:"
        own = next((one for one in row.site_lines if one.selected and one.site == label), None)
        counts = [f"{name} x{count}" if count > 1 else name for name, count in row.nodes]
        nodes = "(no_grad)" if row.no_grad else _cut(counts, room)
        yield line("*" if own else "", texts, nodes).rstrip()
        for one in row.site_lines:
            if one is not own:
                yield one.line(row.depth + 1, widths[0] + 2 + widths[1])


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
    if tree.changes:
        lines, number = tree.site_lines, len(tree.sites)
        left_out = sum(bool(line.left_out) for line in lines)
        same = sum(bool(line.same_as) for line in lines)
        text = f"{plural(number, 'site')} selected (*)"
        if tree.expected not in (None, number):
            text += f" where {tree.expected} are expected"
        text += f", {left_out} left out (-)" if left_out else ""
        text += f", {same} the same as another (=)" if same else ""
        if tree.changes != "gradients":
            text += f"; a transform there changes {tree.changes}"
        yield text
    for note in tree.notes:
        yield f"note: {note}"


def _shape(path: str, tensor: TensorSpec | None) -> str:
    """Return the shape of an output, after its key if it has one."""
    if tensor is None:
        return path.lstrip(".") or "nested"
    keyed = not all(part.isdigit() for part in path.split(".")[1:])
    return f"{path[1:]} {tensor}" if keyed else str(tensor)


def _cut(items: Sequence[str], width: int) -> str:
    """Join as many items as fit into the width, and the number of the others."""
    text, count = ", ".join(items), len(items)
    while len(text) > width and count > 1:
        count -= 1
        text = f"{', '.join(items[:count])}, +{len(items) - count} more"
    return text if len(text) <= width else f"{text[: width - 3]}..."
