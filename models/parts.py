"""Parts of an architecture that only some models have, as frozen values of `ModelConfig`."""

from __future__ import annotations

import dataclasses

from .errors import StokerError

#: How the router's products become scores of experts.
ROUTER_SCORES = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values of all heads are products of one latent vector per token. The cache holds that
    vector, normed, and beside it one rotated key that all heads share.

    Attributes:
      kv_rank: R, width of the latent vector.
      rope_dim: width of the shared rotated key, and of the part of a query that meets it.
      nope_dim: width of the part of a query that meets a head's own key, which is not rotated.
      v_dim: width of a head's value.
      q_rank: width of a latent vector that queries are products of; 0 where they are of the input.
      interleaved: the checkpoint keeps rotated elements in pairs (2i, 2i + 1); once loaded they are
        halves (i, i + rope_dim/2), as everywhere.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int = 0
    interleaved: bool = True

    def __post_init__(self) -> None:
        for name in ("kv_rank", "rope_dim", "nope_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise StokerError(
                    f"latent attention has {name} {getattr(self, name)}; it must be at least 1"
                )
        if self.q_rank < 0:
            raise StokerError(f"latent attention has q_rank {self.q_rank}; it must be 0 or more")

    @property
    def width(self) -> int:
        """W, numbers that the cache holds for each token and layer."""
        return self.kv_rank + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Width of a query."""
        return self.nope_dim + self.rope_dim


@dataclasses.dataclass(frozen=True)
class Router:
    """How a layer's experts are chosen and weighed, where it is not the plain softmax.

    Attributes:
      scores: one of `ROUTER_SCORES`.
      choice_bias: a learned number for each expert is added to its score for the choice alone.
      groups: neighbouring experts form so many groups, of which the best are chosen first.
      used_groups: how many of them; experts of the others are out.
      group_top: a group is as good as the sum of so many of its best scores.
      scale: factor on the weights of those chosen.
    """

    scores: str = "softmax"
    choice_bias: bool = False
    groups: int = 1
    used_groups: int = 1
    group_top: int = 1
    scale: float = 1.0

    def check(self, n_experts: int, n_chosen: int) -> None:
        """Raises `StokerError` unless this can choose `n_chosen` of `n_experts`."""
        if self.scores not in ROUTER_SCORES:
            raise StokerError(
                f"router scores '{self.scores}' are not known; supported: "
                f"{', '.join(ROUTER_SCORES)}"
            )
        if self.groups < 1 or n_experts % self.groups:
            raise StokerError(f"{n_experts} experts do not divide into {self.groups} groups")
        each = n_experts // self.groups
        if not 0 < self.used_groups <= self.groups or n_chosen > self.used_groups * each:
            raise StokerError(
                f"{self.used_groups} of {self.groups} groups of {each} experts cannot give the "
                f"{n_chosen} experts that each token takes"
            )
        if not 0 < self.group_top <= each:
            raise StokerError(
                f"a group of {each} experts cannot be scored by {self.group_top} of them"
            )


#: The softmax alone, as of Mixtral and Qwen3.
PLAIN_ROUTER = Router()
