"""GPUs, links, nodes, topologies and clusters, and the catalogue of known ones."""

from stepcast.hardware.catalog import CatalogError, cluster_names, gpu_names, load_cluster, load_gpu
from stepcast.hardware.cluster import Cluster, Communication, Fabric, FabricKind, Gpu, Link, NetworkKind, Node, Topology
from stepcast.hardware.path import GroupPath, Place, group_path, job_path, neighbour_path, place_ranks, resolve

__all__ = [
    "CatalogError",
    "Cluster",
    "Communication",
    "Fabric",
    "FabricKind",
    "Gpu",
    "GroupPath",
    "Link",
    "NetworkKind",
    "Node",
    "Place",
    "Topology",
    "cluster_names",
    "gpu_names",
    "group_path",
    "job_path",
    "load_cluster",
    "load_gpu",
    "neighbour_path",
    "place_ranks",
    "resolve",
]
