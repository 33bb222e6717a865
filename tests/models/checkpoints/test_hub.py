"""Names of models on a hub: found in the library's cache, and its errors in one sentence."""

from __future__ import annotations

import types

import huggingface_hub
import pytest
from huggingface_hub import errors

from stoker.models.checkpoints.hub import PATTERNS, download_snapshot
from stoker.models.errors import StokerError
from stoker.models.sources import resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path):
    """A cache in the library's own layout that holds one model."""
    root = tmp_path / "models--someone--tiny"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    (root / "refs").mkdir()
    for ref in ("main", "v1"):
        (root / "refs" / ref).write_text(COMMIT)
    return {"cache_dir": tmp_path, "local_files_only": True}


@pytest.mark.parametrize("ending", ["", "@v1", f"@{COMMIT}"])
def test_a_model_in_the_cache_needs_no_network(ending, cache):
    folder = download_snapshot(f"hf:someone/tiny{ending}", **cache)
    assert folder.name == COMMIT and (folder / "config.json").is_file()


@pytest.mark.parametrize("name", ["hf:someone/other", "hf:someone/tiny@v2"])
def test_what_is_not_in_the_cache_is_told_from_there(name, cache):
    with pytest.raises(StokerError, match=rf"'{name}' is not in the cache"):
        download_snapshot(name, **cache)


def test_a_model_without_safetensors_is_refused(cache):
    (next(cache["cache_dir"].rglob("model.safetensors"))).unlink()
    with pytest.raises(StokerError, match="holds no safetensors files"):
        download_snapshot("hf:someone/tiny", **cache)


@pytest.mark.parametrize(
    "name", ["hf:", "hf:tiny", "hf:a/b/c", "hf:a/b@", "hf:a/b@x y", "hf:../b/c"]
)
def test_a_malformed_name_is_refused(name):
    with pytest.raises(StokerError, match="is not a model's name"):
        resolve(name)


def answer(status):
    return types.SimpleNamespace(status_code=status, headers={}, request=None)


FAILURES = {
    "gated": (errors.GatedRepoError, "is gated"),
    "missing": (errors.RepositoryNotFoundError, "is not there, or is private"),
    "revision": (errors.RevisionNotFoundError, "no such revision"),
    "server": (errors.HfHubHTTPError, r"the hub says 503"),
    "disk": (lambda text, response: OSError(28, "No space left on device"), "No space left"),
    "network": (lambda text, response: ConnectionError(text), r"\(ConnectionError\)"),
    "name": (lambda text, response: errors.HFValidationError(text), "not a name that the hub"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures_are_one_sentence_without_addresses(case, monkeypatch):
    kind, reason = FAILURES[case]
    asked = {}

    def fail(repository, **options):
        asked.update(options, repository=repository)
        raise kind("at example.org with secret", response=answer(503))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(StokerError, match=reason) as caught:
        resolve("hf:someone/tiny@v1")
    message = str(caught.value)
    assert message.startswith("'hf:someone/tiny@v1' ") and "example.org" not in message
    assert asked["repository"] == "someone/tiny" and asked["revision"] == "v1"
    assert asked["allow_patterns"] == list(PATTERNS)
    assert not any(name.endswith(("bin", "*")) for name in PATTERNS)
