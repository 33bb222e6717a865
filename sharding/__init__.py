"""Meshes of devices, and which of their axes each logical axis is split over."""

from .mesh import make_mesh
from .rules import RULES, Rules, partition_spec, sharding

__all__ = ["RULES", "Rules", "make_mesh", "partition_spec", "sharding"]
