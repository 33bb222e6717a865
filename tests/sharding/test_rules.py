"""Meshes and rules as data, and where axes are cut."""

from __future__ import annotations

import gin
import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from stoker.sharding import (
    WHOLE,
    even_cut,
    head_cut,
    make_mesh,
    parse_mesh,
    parse_rules,
    sharding,
    split_of,
    wide_cut,
)

EIGHT = AbstractMesh((2, 4), ("expert", "tensor"))


def test_a_mesh_is_read_from_a_flag() -> None:
    assert parse_mesh("data:2, tensor:4") == {"data": 2, "tensor": 4}
    assert parse_mesh("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows:2", "no axis 'rows'; use data, sequence, expert, tensor"),
        ("tensor:2,tensor:2", "'tensor' is given twice"),
        ("tensor", "'tensor' has size ''"),
        ("tensor:0", "'tensor' has size '0'"),
        ("tensor:-2", "'tensor' has size '-2'"),
        ("tensor:²", "'tensor' has size '²'"),
    ],
)
def test_what_is_no_mesh_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor:8 takes 8 devices; there are 1"):
        make_mesh({"tensor": 8}, jax.devices()[:1])


def test_axes_are_ordered_from_the_outermost() -> None:
    mesh = make_mesh({"tensor": 1, "data": 1}, jax.devices()[:1])
    assert mesh.axis_names == ("data", "tensor")


def test_an_array_takes_a_mesh_axis_once() -> None:
    split = split_of(EIGHT)
    assert split.resolve(("experts", "ff", "model")) == (("expert",), ("tensor",), ())
    assert split.axes("ff") == split.axes("heads") == ("expert", "tensor")
    assert split.degree("ff") == 8 and split.degree("pages") == 1
    assert split.spec(("vocab", "model")) == PartitionSpec(("expert", "tensor"), None)


def test_axes_of_one_device_split_nothing() -> None:
    assert split_of(AbstractMesh((1, 1), ("data", "tensor"))).rules == WHOLE.rules == ()


def test_rules_are_overridden() -> None:
    rules = parse_rules("vocab=, ff=tensor|expert")
    assert rules == {"vocab": (), "ff": (("tensor",), ("expert",))}
    split = split_of(EIGHT, rules)
    assert split.axes("vocab") == () and split.axes("ff") == ("tensor",)
    assert split.axes("heads") == ("expert", "tensor")


def test_wrong_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="no rule is for 'rows'"):
        parse_rules("rows=tensor")
    with pytest.raises(ValueError, match="no axis 'wide'"):
        parse_rules("ff=wide")
    with pytest.raises(ValueError, match="'heads' and 'kv_heads' differently"):
        split_of(EIGHT, {"heads": ()})


def test_whole_arrays_are_replicated_where_they_do_not_divide() -> None:
    mesh = AbstractMesh((2, 4), ("data", "tensor"))
    assert sharding(("ff", "model"), (160, 64), mesh).spec == PartitionSpec("tensor", None)
    assert sharding(("kv_heads", None), (6, 3), mesh).spec == PartitionSpec(None, None)


def test_even_parts_are_padded_at_the_end() -> None:
    cut = even_cut(10, 4)
    assert cut.ranges == ((0, 3), (3, 6), (6, 9), (9, 10)) and cut.padded == 12
    assert even_cut(2, 4).ranges == ((0, 1), (1, 2), (2, 2), (2, 2))


@pytest.mark.parametrize(
    ("size", "degree", "width"),
    [(14336, 8, 1792), (11008, 8, 1408), (1536, 8, 192), (160, 4, 40), (500, 8, 64), (6, 4, 2)],
)
def test_columns_are_cut_at_round_numbers_where_that_adds_little(
    size: int, degree: int, width: int
) -> None:
    assert wide_cut(size, degree).width == width
    assert wide_cut(size, 1).width == size


@pytest.mark.parametrize(
    ("heads", "degree", "local", "repeats"),
    [
        ((64, 8), 8, (8, 1), 1),
        ((64, 8), 16, (4, 1), 2),
        ((8, 2), 4, (2, 1), 2),
        ((9, 3), 2, (6, 2), 1),  # one KV head of zeros
        ((9, 3), 4, (3, 1), 1),
        ((9, 3), 8, (2, 1), 2),  # and a query head of zeros in every group
        ((8, 1), 3, (3, 1), 3),
        ((12, 3), 8, (2, 1), 2),
        ((8, 2), 1, (8, 2), 1),
    ],
)
def test_heads_stay_with_their_kv_head(
    heads: tuple[int, int], degree: int, local: tuple[int, int], repeats: int
) -> None:
    n_heads, n_kv_heads = heads
    cut = head_cut(*heads, degree)
    assert (cut.query.width, cut.kv.width) == local and cut.repeats == repeats
    assert cut.query.width % cut.kv.width == 0
    group, seen = n_heads // n_kv_heads, []
    for query, kv in zip(cut.query.ranges, cut.kv.ranges, strict=True):
        for place, head in enumerate(range(*query)):
            seen.append(head)
            # In a part, as in the whole, query head i meets KV head i // group.
            assert kv[0] + place // (cut.query.width // cut.kv.width) == head // group
    assert sorted(seen) == list(range(n_heads))


def test_rules_are_bound_by_gin() -> None:
    """As `load_model.rules` would be: the functions take plain values, and import no gin."""
    bound = gin.external_configurable(split_of, module="stoker")
    try:
        gin.parse_config("split_of.rules = {'vocab': (), 'ff': [['tensor']]}")
        split = bound(EIGHT)
    finally:
        gin.clear_config()
    assert split.axes("vocab") == () and split.axes("ff") == ("tensor",)
    assert split.axes("heads") == ("expert", "tensor")
