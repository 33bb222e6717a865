"""Where one axis is cut, and what is padded or repeated where it does not divide."""

from __future__ import annotations

import dataclasses

#: Feed-forward columns are cut at multiples of the largest of these that adds at most an eighth:
#: quantisation groups and the tiles of kernels stay whole.
_ALIGNMENTS = (128, 64, 32, 16, 8, 4)


@dataclasses.dataclass(frozen=True)
class Cut:
    """One axis in parts of equal width.

    Attributes:
      width: of each part; what its range lacks is zeros at its end.
      ranges: where each part's elements are in the whole, start and end. Parts may be empty, and
        several may be the same.
    """

    width: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def degree(self) -> int:
        """The number of parts."""
        return len(self.ranges)

    @property
    def padded(self) -> int:
        """Elements of all parts, with padding and repetitions."""
        return self.width * self.degree

    def times(self, unit: int) -> Cut:
        """The same cut of an axis that has `unit` elements for each of this one's."""
        ranges = tuple((start * unit, end * unit) for start, end in self.ranges)
        return Cut(self.width * unit, ranges)


def even_cut(size: int, degree: int, multiple: int = 1) -> Cut:
    """`size` elements in `degree` parts whose width is a multiple of `multiple`."""
    width = _up(-(-size // degree), multiple)
    starts = (min(part * width, size) for part in range(degree))
    return Cut(width, tuple((start, min(start + width, size)) for start in starts))


def wide_cut(size: int, degree: int) -> Cut:
    """Feed-forward columns in parts, at multiples of a power of two where that adds little."""
    if degree == 1:
        return even_cut(size, 1)
    cuts = (even_cut(size, degree, multiple) for multiple in _ALIGNMENTS)
    few = (cut for cut in cuts if 8 * (cut.padded - size) <= size)
    return next(few, even_cut(size, degree))


@dataclasses.dataclass(frozen=True)
class HeadCut:
    """Attention heads in parts that hold whole groups, or equal shares of one.

    Attributes:
      query: of the query heads.
      kv: of the KV heads.
      repeats: parts that hold the same KV head, each for other query heads.
    """

    query: Cut
    kv: Cut
    repeats: int


def head_cut(n_heads: int, n_kv_heads: int, degree: int) -> HeadCut:
    """N query heads, G to each of K KV heads, in `degree` parts.

    Where K does not divide by the degree, KV heads are added until it does; where there are fewer
    than parts, until they divide it, and then several parts hold one of them, and share its query
    heads, which are rounded up to a multiple. What is added is zeros.
    """
    group = n_heads // n_kv_heads
    kv = next(count for count in range(n_kv_heads, n_kv_heads + degree) if _divides(count, degree))
    repeats = max(degree // kv, 1)
    if repeats == 1:
        whole = even_cut(n_kv_heads, degree, kv // degree)
        return HeadCut(whole.times(group), whole, 1)
    share = -(-group // repeats)
    query, heads = [], []
    for part in range(degree):
        head, place = divmod(part, repeats)
        real = head < n_kv_heads
        first = min(place * share, group)
        last = min(first + share, group)
        base = head * group
        query.append((base + first, base + last) if real else (n_heads, n_heads))
        heads.append((head, head + 1) if real else (n_kv_heads, n_kv_heads))
    return HeadCut(Cut(share, tuple(query)), Cut(1, tuple(heads)), repeats)


def _divides(count: int, degree: int) -> bool:
    return count % degree == 0 or degree % count == 0


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
