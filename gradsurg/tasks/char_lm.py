"""Character language modelling: predict the next character of a text."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from gradsurg.plugins.fields import Contradiction, FieldError, validated
from gradsurg.tasks.base import Classification, Data
from gradsurg.tasks.data import cache
from gradsurg.tasks.data.arrays import Count

UNKNOWN = 0  # the token of a character that is not in the training part

MOBY_DICK = "moby_dick.txt"
MOBY_DICK_FOLDER = "text"  # in the user's cache
MOBY_DICK_SHA256 = "0af87669e16afbac484ab450db3343221bc6582e65565fcaa535807b5c1df370"


@validated
class CharLM(Classification):
    """Predict each character from those before it in the same piece of a text, by cross-entropy.

    The text is the UTF-8 file `path`, or with `text=moby_dick` the file fetched by `python -m
    gradsurg.tasks.fetch text`. By default it is the language help that comes with Python
    (`pydoc_data.topics`, PSF licence), which differs between releases of Python.

    Its first `max_characters` are used; the last `test_fraction` of them are the test. Both parts
    are cut into pieces of `length`, a remainder is dropped. Tokens are the characters of the
    training part in sorted order, from 1; 0 is any other. The loss is in nats for a character.
    """

    path: Annotated[str, Field(min_length=1)] | None = None
    text: Literal["moby_dick"] | None = None
    length: Count = 64
    test_fraction: Annotated[float, Field(ge=0.01, le=0.9)] = 0.1
    max_characters: Count = 200_000

    def __post_init__(self) -> None:
        if self.path is not None and not Path(self.path).expanduser().is_file():
            raise Contradiction("path", f"must be a file, found '{self.path}'")
        if self.path is not None and self.text is not None:
            found = f"found path='{self.path}' and text={self.text}"
            raise Contradiction("text", f"must be null where a path is given, {found}")

    def load(self) -> Data:
        return _data(self, self.content).copy()

    def files(self) -> Sequence[Path]:
        if self.path is not None:
            return (Path(self.path).expanduser(),)
        if self.text is not None:
            return (_moby_dick(),)
        spec = find_spec("pydoc_data.topics")
        return (Path(spec.origin),) if spec is not None and spec.origin is not None else ()


@lru_cache(maxsize=2)
def _data(task: CharLM, content: str) -> Data:
    """Load the data; `content`, a hash of the text, is part of the cache's key."""
    text = _text(task)[: task.max_characters]
    border = len(text) - round(task.test_fraction * len(text))
    tokens = {character: token for token, character in enumerate(sorted(set(text[:border])), 1)}
    parts = []
    for part in (text[:border], text[border:]):
        numbers = torch.tensor([tokens.get(character, UNKNOWN) for character in part])
        count = (len(part) - 1) // task.length  # the last piece is followed by a character
        if count < 1:
            rule = f"must be < {len(part)}, the characters of its smaller part, found {task.length}"
            raise FieldError("CharLM", [("length", rule)])
        used = count * task.length
        parts += [numbers[first : first + used].view(count, task.length) for first in (0, 1)]
    num_tokens = len(tokens) + 1
    return Data(
        *(part.clone() for part in parts),
        input_shape=(task.length,),
        num_outputs=num_tokens,
        num_tokens=num_tokens,
        every_step=True,
    )


def _text(task: CharLM) -> str:
    if task.text is not None:
        return _read_moby_dick()
    if task.path is not None:
        try:
            return Path(task.path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FieldError("CharLM", [("path", f"cannot be read: {error}")]) from error
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _moby_dick() -> Path:
    path = cache.place(MOBY_DICK_FOLDER) / MOBY_DICK
    if not path.is_file():
        command = cache.command(MOBY_DICK_FOLDER)
        how = f"{command} puts it there, or path takes a text of your own"
        raise FieldError("CharLM", [("text", f"moby_dick is not in '{path.parent}': {how}")])
    return path


def _read_moby_dick() -> str:
    path = _moby_dick()
    if fault := moby_dick_fault(path):
        how = f"{cache.command(MOBY_DICK_FOLDER)} puts it there anew"
        raise FieldError("CharLM", [("text", f"{fault} in '{path.parent}': {how}")])
    return path.read_text(encoding="utf-8")


def moby_dick_fault(file: Path) -> str:
    """Return why a file is not the published text; empty if it is."""
    try:
        same = sha256(file.read_bytes()).hexdigest() == MOBY_DICK_SHA256
    except OSError as error:
        return f"{MOBY_DICK} cannot be read ({error.strerror})"
    return "" if same else f"{MOBY_DICK} has another sha256"
