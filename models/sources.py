"""Where models come from: a file, a folder, a hub, or an alias that is downloaded once."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.resources
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from .. import configs
from .checkpoints.gguf import shard_paths
from .checkpoints.hub import PREFIX, download_snapshot
from .checkpoints.manifest import is_native_folder
from .checkpoints.safetensors import is_safetensors_folder
from .errors import StokerError

DEFAULT_MODEL = "smollm2-135m"

# Few retries: without a network pip's own five would keep the user waiting.
PIP_DOWNLOAD = (
    *(sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"),
    *("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"),
    *("--retries=1", "--timeout=20"),
)
_POLL_SECONDS = 0.2
_NETWORK_SIGNS = ("connection", "resolve host", "name resolution", "timed out", "unreachable")
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclasses.dataclass(frozen=True)
class Alias:
    """A model file inside a wheel.

    Attributes:
      name: what users type.
      description: one line.
      licence: SPDX identifier.
      requirement: what pip is asked for, with its exact version.
      wheel_bytes: size of the wheel.
      wheel_sha256: of the wheel.
      member: path of the file inside the wheel.
      member_bytes: size of the file.
      member_sha256: of the file.
    """

    name: str
    description: str
    licence: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str


def aliases() -> dict[str, Alias]:
    """All known aliases, from `configs/models.toml`."""
    text = importlib.resources.files(configs).joinpath("models.toml").read_text("utf-8")
    return {name: Alias(name=name, **entry) for name, entry in tomllib.loads(text).items()}


def cache_folder() -> pathlib.Path:
    """Where downloads are kept: `stoker` in the user's cache folder."""
    return pathlib.Path(platformdirs.user_cache_dir("stoker", appauthor=False))


def resolve(
    name: str | os.PathLike[str],
    *,
    cache: pathlib.Path | None = None,
    pip: Sequence[str] = PIP_DOWNLOAD,
) -> pathlib.Path:
    """What a name stands for: a GGUF file (of a split model: its first shard), or a folder.

    A folder with safetensors files or a `stoker.json` is one, whatever else it holds. An alias
    comes first, so a folder of the same name is written `./name`. A model of an alias is downloaded
    at its first use and found in the cache, without network or pip, ever after.

    Args:
      name: alias, GGUF file, folder that holds one model, or `hf:organisation/name[@revision]`,
        which is downloaded with `huggingface_hub` into its own cache.
      cache: where downloads are kept; by default `cache_folder()`.
      pip: the command that downloads a requirement; `--dest` and the requirement follow.

    Raises:
      StokerError: there is no such model, or it cannot be downloaded.
    """
    known = aliases()
    if isinstance(name, str) and name in known:
        return fetch(known[name], cache or cache_folder(), pip=pip)
    if isinstance(name, str) and name.startswith(PREFIX):
        return download_snapshot(name)
    try:
        path = pathlib.Path(name).expanduser()
        if str(name) and (is_safetensors_folder(path) or is_native_folder(path)):
            return path
        if path.suffix == ".safetensors" and path.is_file():
            raise StokerError(
                f"'{path}' holds tensors alone; give its folder, with config.json beside it"
            )
        # An empty name would be the current folder.
        if str(name) and (path.exists() or path.name.lower().endswith(".gguf")):
            return shard_paths(path)[0]
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StokerError(f"cannot look for the model '{name!s:.80}': {reason}") from None
    listed = ", ".join(known)
    if len(path.parts) > 1 or path.suffix:
        raise StokerError(
            f"path '{name}' does not exist; give a GGUF file, its folder, a folder of safetensors "
            f"files, {PREFIX}organisation/name, or {listed}"
        )
    raise StokerError(
        f"model '{name}' is not known; use {listed}, {PREFIX}organisation/name, or the path of a "
        "GGUF file or model folder"
    )


def fetch(alias: Alias, cache: pathlib.Path, *, pip: Sequence[str] = PIP_DOWNLOAD) -> pathlib.Path:
    """The file of an alias in the cache, downloaded and verified where it is not there yet.

    Several processes may do so at once. An interruption leaves nothing behind. Raises
    `StokerError` without network, pip, disk space or write permission, or where a hash differs.
    """
    folder = cache / "models" / f"{alias.name}-{alias.member_sha256[:12]}"
    target = folder / pathlib.PurePosixPath(alias.member).name
    # The hash was checked before the file took its name; the size catches later damage.
    with contextlib.suppress(PermissionError):
        if target.is_file() and target.stat().st_size == alias.member_bytes:
            return target
    # pip holds the wheel twice for a moment; the file is unpacked next to it.
    needed = 2 * alias.wheel_bytes + alias.member_bytes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < needed:
            raise OSError(errno.ENOSPC, "")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
            wheel = _download(alias, pathlib.Path(scratch), pip)
            _unpack(alias, wheel, target)
    except OSError as error:
        if error.errno in _FULL:
            raise StokerError(
                f"the disk of '{folder}' is full: '{alias.name}' needs {needed / 1e6:.0f} MB "
                "there; free some space"
            ) from None
        raise StokerError(
            f"'{alias.name}' cannot be kept in '{folder}' ({error.strerror or error}); make that "
            "folder writable or set XDG_CACHE_HOME to one that is"
        ) from None
    return target


def _download(alias: Alias, scratch: pathlib.Path, pip: Sequence[str]) -> pathlib.Path:
    """The verified wheel of `alias`, in the folder `scratch`."""
    kept = scratch / "kept"
    command = [*pip, "--dest", str(kept), alias.requirement]
    # Only pip's temporary folder grows while it downloads, so that is put where it can be watched.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with open(scratch / "messages", "w+b") as messages, byte_bar(alias.name) as progress:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            env=environment,
        )
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                    break
                progress(min(_largest_file(scratch), alias.wheel_bytes), alias.wheel_bytes)
        finally:
            process.kill()
            process.wait()
        messages.seek(0)
        said = messages.read().decode("utf-8", "replace")
    if process.returncode:
        raise _pip_failure(alias, said)
    wheels = sorted(kept.glob("*.whl"))
    if not wheels:
        raise StokerError(f"pip downloaded no wheel for {alias.requirement}; try again")
    _verify(wheels[0], alias.wheel_sha256, alias.requirement)
    return wheels[0]


def _largest_file(folder: pathlib.Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # pip moves and removes files meanwhile.
            with contextlib.suppress(OSError):
                largest = max(largest, os.path.getsize(os.path.join(root, name)))
    return largest


def _unpack(alias: Alias, wheel: pathlib.Path, target: pathlib.Path) -> None:
    """Puts the model file of `wheel` at `target`, whole or not at all."""
    part = wheel.with_name("member")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(alias.member) as source,
            open(part, "wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile):
        raise StokerError(
            f"{alias.requirement} does not hold '{alias.member}'; try again"
        ) from None
    _verify(part, alias.member_sha256, alias.member)
    os.replace(part, target)


def _verify(path: pathlib.Path, sha256: str, what: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise StokerError(
            f"the download of {what} has SHA-256 {found[:12]}... where {sha256[:12]}... was "
            "expected; try again, and check your package index if it happens twice"
        )


def _pip_failure(alias: Alias, said: str) -> StokerError:
    """What to tell a user about pip's messages."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return StokerError(
            f"'{alias.name}' is downloaded with pip, which this Python lacks; run "
            f"'{sys.executable} -m ensurepip', or give the path of a GGUF file"
        )
    if any(os.strerror(code) in line for code in _FULL for line in lines):
        raise OSError(errno.ENOSPC, "")
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    quoted = _without_hosts(errors[-1].removeprefix("ERROR:").strip())
    if any(sign in line.lower() for sign in _NETWORK_SIGNS for line in lines):
        return StokerError(
            f"'{alias.name}' could not be downloaded because the network failed (pip: {quoted}); "
            "connect and try again, or give the path of a GGUF file"
        )
    return StokerError(
        f"'{alias.name}' could not be downloaded (pip: {quoted}); check pip's configuration, or "
        "give the path of a GGUF file"
    )


def _without_hosts(line: str) -> str:
    """One short line without addresses: an index may be private and its URL hold a password."""
    line = re.sub(r"\S+://\S+", "...", line)
    line = re.sub(r"\b(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?\b|\b\d+(?:\.\d+){3}(?::\d+)?\b", "...", line)
    return line if len(line) <= 160 else line[:157] + "..."


@contextlib.contextmanager
def byte_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, on a terminal only; what it yields is told bytes done and bytes in all."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TransferSpeedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
