"""Character language modelling: which character comes next in a text."""

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from gradsurg.plugins.fields import Contradiction, FieldError, validated
from gradsurg.tasks import _moby_dick
from gradsurg.tasks._generated import Count
from gradsurg.tasks.base import Classification, Data

UNKNOWN = 0  # a character that training does not have


@validated
class CharLM(Classification):
    """Predict every character of a text from those before it in its piece, by cross-entropy.

    The text is the file `path` in UTF-8, or with `text` moby_dick what `python -m
    gradsurg.tasks.fetch text` put into the user's cache folder, or without either the help on
    Python's own language that comes with Python (`pydoc_data.topics`, PSF licence; another text in
    another release of Python). Its first `max_characters` are taken; the last `test_fraction` of
    them are the test. Both parts are cut into pieces of `length`, a rest is dropped. Tokens are the
    characters of the training part in their order, from 1; 0 is any other. The loss is in nats for
    a character.
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
            return (_moby_dick.path(),)
        spec = find_spec("pydoc_data.topics")
        return (Path(spec.origin),) if spec is not None and spec.origin is not None else ()


@lru_cache(maxsize=2)
def _data(task: CharLM, content: str) -> Data:
    """Kept as long as the text has that `content`."""
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
        return _moby_dick.read()
    if task.path is not None:
        try:
            return Path(task.path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FieldError("CharLM", [("path", f"cannot be read: {error}")]) from error
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))
