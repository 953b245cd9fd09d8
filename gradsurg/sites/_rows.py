"""The rows that a tree is made of, and how they are printed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradsurg.sites._recorder import Like, Mark

WIDTH = 120
NAMES = 40  # what names may take before each leaves out what its caller's name says
CLASSES, OUTPUTS = 28, 40
HEADS = ("module#call", "class", "output", "params", "nodes")


@dataclass(frozen=True, slots=True)
class Row:
    """One call of a module, or a module that is never called: its `call` is None.

    `outputs` are the tensors that it returned, each with its path; `num_params` are its own, and
    `again` says that an earlier row has them; `nodes` are those made in it, by name; `no_grad` that
    it made none because gradients were off. `depth` counts the calls around it.
    """

    name: str
    call: int | None
    depth: int
    kind: str
    outputs: tuple[tuple[str, Like | None], ...] = ()
    num_params: int = 0
    again: bool = False
    nodes: tuple[tuple[str, int], ...] = ()
    no_grad: bool = False
    marks: tuple[Mark, ...] = ()

    @property
    def label(self) -> str:
        """As the ids of its sites begin."""
        return self.name if self.call is None else f"{self.name}#{self.call}"


@dataclass(frozen=True, repr=False)
class Tree:
    """The calls of a model in order, then what was never called; printed, it is a table.

    `loose` are marks that belong to no module. `expected` is how many sites were said to be there.
    """

    rows: tuple[Row, ...]
    num_params: int
    loose: tuple[Mark, ...] = ()
    selected: bool = False
    expected: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[Mark, ...]:
        """All that the selection has met."""
        return tuple(mark for row in self.rows for mark in row.marks) + self.loose

    @property
    def sites(self) -> tuple[str, ...]:
        """The ids of what would be hooked."""
        return tuple(mark.site for mark in self.marks if mark.hit)

    def __str__(self) -> str:
        lines = [*_table(self.rows)]
        if self.loose:
            lines += ["  elsewhere:", *(_mark_line(mark, 1, 0) for mark in self.loose)]
        return "\n".join([*lines, "", *_summary(self)])

    __repr__ = __str__


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each row and each of its marks; the margin says what was selected."""
    short = max((2 * row.depth + len(row.label) for row in rows), default=0) > NAMES
    labels = _short_labels(rows) if short else [row.label for row in rows]
    cells = [
        (
            "  " * row.depth + label,
            _cut([row.kind], CLASSES),
            _cut([_shown(path, like) for path, like in row.outputs], OUTPUTS),
            _number(row),
        )
        for row, label in zip(rows, labels, strict=True)
    ]
    names, kinds, outputs, numbers = (
        max(map(len, column)) for column in zip(HEADS[:-1], *cells, strict=True)
    )
    room = max(WIDTH - names - kinds - outputs - numbers - 2 * len(HEADS), 24)

    def line(sign: str, name: str, kind: str, output: str, number: str, nodes: str) -> str:
        text = f"{sign:2}{name:{names}}  {kind:{kinds}}  {output:{outputs}}  {number:>{numbers}}"
        return f"{text}  {nodes}".rstrip()

    yield line("", *HEADS)
    calls = True
    for row, label, texts in zip(rows, labels, cells, strict=True):
        if calls and row.call is None:
            calls = False
            yield "  never called:"
        own = next((mark for mark in row.marks if mark.hit and mark.site == label), None)
        nodes = [f"{name} x{count}" if count > 1 else name for name, count in row.nodes]
        yield line("*" if own else "", *texts, "(no_grad)" if row.no_grad else _cut(nodes, room))
        for mark in row.marks:
            if mark is not own:
                yield _mark_line(mark, row.depth + 1, names + 2 + kinds)


def _mark_line(mark: Mark, depth: int, width: int) -> str:
    where = "  " * depth + mark.site
    if mark.is_also:
        return f"= {where} is {mark.is_also}"
    if mark.left_out:
        return f"- {where}: {mark.left_out}"
    return f"* {where:{width}}  {mark.like or ''}".rstrip()


def _short_labels(rows: Sequence[Row]) -> list[str]:
    """What each row is called, without what the name of its caller says."""
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
    params = many(tree.num_params, "parameter")
    yield f"{many(calls, 'call')}, {params}, {many(nodes, 'node')}"
    if tree.selected:
        number = len(tree.sites)
        said = f"{many(number, 'site')} selected (*)"
        if tree.expected not in (None, number):
            said += f" where {tree.expected} are expected"
        out = sum(bool(mark.left_out) for mark in tree.marks)
        same = sum(bool(mark.is_also) for mark in tree.marks)
        said += f", {out} left out (-)" if out else ""
        said += f", {same} the same as another (=)" if same else ""
        yield said
    for note in tree.notes:
        yield f"note: {note}"


def _shown(path: str, like: Like | None) -> str:
    """The shape of an output, behind its key where it has one."""
    if like is None:
        return path.lstrip(".") or "nested"
    keyed = not all(part.isdigit() for part in path.split(".")[1:])
    return f"{path[1:]} {like}" if keyed else str(like)


def _number(row: Row) -> str:
    """How many parameters; in brackets where they stand in an earlier row."""
    shown = f"{row.num_params:,}" if row.num_params else ""
    return f"({shown})" if shown and row.again else shown


def _cut(items: Sequence[str], width: int) -> str:
    """As many of the items as there is room for, and how many more there are."""
    text = ", ".join(items)
    kept = len(items)
    while len(text) > width and kept > 1:
        kept -= 1
        text = f"{', '.join(items[:kept])}, +{len(items) - kept} more"
    return text if len(text) <= width else f"{text[: width - 3]}..."


def many(count: int, what: str) -> str:
    """`1 site`, `2 sites`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
