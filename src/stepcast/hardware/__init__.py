"""GPUs, links, nodes, topologies and clusters, and the catalogue of known ones."""

from stepcast.hardware.catalog import load_cluster, load_gpu
from stepcast.hardware.cluster import Cluster, Gpu
from stepcast.hardware.path import Place, group_path, resolve

__all__ = ["Cluster", "Gpu", "Place", "group_path", "load_cluster", "load_gpu", "resolve"]
