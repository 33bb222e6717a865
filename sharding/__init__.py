"""Meshes of devices, which of their axes each logical axis is split over, and how it is cut."""

from .cuts import Cut, HeadCut, even_cut, head_cut, wide_cut
from .hosts import AUTO, Hosts, Team, join
from .meeting import HostsError
from .mesh import AXES, make_mesh, parse_mesh
from .rules import RULES, WHOLE, Rules, Split, parse_rules, sharding, split_of

__all__ = [
    "AUTO",
    "AXES",
    "RULES",
    "WHOLE",
    "Cut",
    "HeadCut",
    "Hosts",
    "HostsError",
    "Rules",
    "Split",
    "Team",
    "even_cut",
    "head_cut",
    "join",
    "make_mesh",
    "parse_mesh",
    "parse_rules",
    "sharding",
    "split_of",
    "wide_cut",
]
