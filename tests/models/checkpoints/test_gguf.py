"""GGUF-10: split files, folders, and what an open checkpoint reads."""

from __future__ import annotations

import shutil

import gguf
import numpy as np
import pytest
from gguf_files import Tiny, write_gguf

from stoker.models.checkpoints.gguf import GGUFCheckpoint, shard_paths
from stoker.models.errors import StokerError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", Tiny())


@pytest.fixture
def split(tmp_path):
    first = write_gguf(tmp_path / "tiny.gguf", Tiny(), shard_tensors=9)
    assert first.name == "tiny-00001-of-00003.gguf"
    return first


def shard(first, number):
    return first.with_name(f"tiny-0000{number}-of-00003.gguf")


def test_any_shard_and_the_folder_stand_for_the_whole_set(split, whole):
    single = GGUFCheckpoint.open(whole)
    for name in (split, shard(split, 2), shard(split, 3), split.parent):
        checkpoint = GGUFCheckpoint.open(name)
        assert checkpoint.paths == tuple(shard(split, number) for number in (1, 2, 3))
        assert checkpoint.metadata["llama.block_count"] == 2
        assert checkpoint.tensors.keys() == single.tensors.keys()
        for tensor in single.tensors:
            np.testing.assert_array_equal(checkpoint.read(tensor), single.read(tensor))
        assert checkpoint.file_bytes == sum(path.stat().st_size for path in checkpoint.paths)


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_shard_is_named(split, missing):
    shard(split, missing).unlink()
    for name in (1, 2, 3):
        with pytest.raises(
            StokerError, match=f"shard {missing} of 3 .*0000{missing}-of-00003.gguf"
        ):
            GGUFCheckpoint.open(shard(split, name))
    with pytest.raises(StokerError, match=f"0000{missing}-of-00003.gguf"):
        GGUFCheckpoint.open(split.parent)


def test_shards_joined_with_cat_are_refused(split, tmp_path):
    joined = tmp_path / "joined" / "tiny.gguf"
    joined.parent.mkdir()
    joined.write_bytes(b"".join(shard(split, number).read_bytes() for number in (1, 2, 3)))
    with pytest.raises(StokerError, match="second GGUF file"):
        GGUFCheckpoint.open(joined)


def test_a_shard_under_another_name_is_refused(split, tmp_path):
    renamed = tmp_path / "alone.gguf"
    shutil.copy(shard(split, 2), renamed)
    with pytest.raises(StokerError, match="shard 2 of 3"):
        GGUFCheckpoint.open(renamed)


def test_swapped_shards_are_refused(split, tmp_path):
    second, third = shard(split, 2).read_bytes(), shard(split, 3).read_bytes()
    shard(split, 2).write_bytes(third)
    shard(split, 3).write_bytes(second)
    with pytest.raises(StokerError, match="says that it is shard 3 of 3 but its name says 2"):
        GGUFCheckpoint.open(split)


def test_one_of_one_is_a_whole_file(whole, tmp_path):
    path = tmp_path / "tiny-00001-of-00001.gguf"
    shutil.copy(whole, path)
    assert GGUFCheckpoint.open(path).paths == (path,)
    assert shard_paths(tmp_path) == (path,)


def test_impossible_shard_numbers(tmp_path):
    path = tmp_path / "tiny-00004-of-00003.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(StokerError, match="outside 1 to 3"):
        shard_paths(path)
    with pytest.raises(StokerError, match="outside 1 to 0"):
        shard_paths(tmp_path / "tiny-00001-of-00000.gguf")


def test_folders(whole, tmp_path):
    with pytest.raises(StokerError, match=r"holds no \.gguf file"):
        shard_paths(tmp_path)
    shutil.copy(whole, tmp_path / "a.gguf")
    (tmp_path / "README.md").write_text("not a model")
    assert shard_paths(tmp_path) == (tmp_path / "a.gguf",)
    shutil.copy(whole, tmp_path / "b.gguf")
    with pytest.raises(StokerError, match=r"holds 2 models \(a.gguf, b.gguf\)"):
        shard_paths(tmp_path)
    with pytest.raises(StokerError, match="does not exist"):
        shard_paths(tmp_path / "c.gguf")


def test_views_equal_the_gguf_packages_and_survive_release(whole):
    checkpoint = GGUFCheckpoint.open(whole)
    for tensor in gguf.GGUFReader(whole).tensors:
        want = np.asarray(tensor.data).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(checkpoint.read(tensor.name), want)
        checkpoint.release(tensor.name)
        np.testing.assert_array_equal(checkpoint.read(tensor.name), want)
        assert not checkpoint.read(tensor.name).flags.writeable


def test_an_unsupported_type_is_refused_before_anything_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "iq.gguf", "llama")
    kind = gguf.GGMLQuantizationType.IQ4_NL
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 36), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StokerError, match=r"'blk\.0\.ffn_up\.weight' has type IQ4_NL"):
        GGUFCheckpoint.open(tmp_path / "iq.gguf")
