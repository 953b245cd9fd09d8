"""Write the pictures of the documentation, light and dark: python scripts/pictures.py STUDY

STUDY is the folder of the README's first command, as runs/digits-mlp.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from gradsurg.report.charts import DARK, LIGHT
from gradsurg.report.paper import write_paper
from gradsurg.report.study import read_study

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
NAMES = ("curves", "effects")


def main(study: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    with TemporaryDirectory() as place:
        write_paper(read_study(study), Path(place))
        for name in NAMES:
            light = (Path(place) / f"{name}-6.8in.svg").read_text(encoding="utf-8")
            dark = light
            for colour, replaced in zip(LIGHT, DARK, strict=True):
                dark = dark.replace(colour, replaced)
            (FOLDER / f"{name}.svg").write_text(light, encoding="utf-8")
            (FOLDER / f"{name}-dark.svg").write_text(dark, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
