"""Copies to the host and updates there, against published and measured figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.cost.host import copy_price, host_of, update_price
from stepcast.hardware import load_cluster
from stepcast.hardware.cluster import Host, Link
from stepcast.ir.framework import ADAM, OPTIMIZERS, OptimizerKind
from stepcast.ir.layout import HostWay
from stepcast.ir.work import HostCopy, HostUpdate
from stepcast.units import GB, GIB

# A DGX-2: two Xeon 8168 with six channels of DDR4-2666 each.
DGX_2 = Host(1.5e12, 12 * 2666e6 * 8, Link(16 * GB, 20e-6), links=1)


def update(parameters: float, fused: bool) -> HostUpdate:
    """Of mixed-precision AdamW: fp32 weight, gradient and moments, and a 16-bit copy written."""
    passes = ADAM.passes if fused else OPTIMIZERS[OptimizerKind.ADAMW].listed
    columns = (passes.weight, passes.moments, passes.temporary)
    read, write = (4 * sum(each[way] for each in columns) for way in (0, 1))
    return HostUpdate((read + 4 * passes.gradient) * parameters, (write + 2) * parameters, fused)


@pytest.mark.parametrize(("billions", "seconds"), [(1, 0.22), (4, 1.03), (10, 2.57)])
def test_an_update_takes_as_long_as_deepspeeds_cpu_adam(billions: int, seconds: float) -> None:
    """Ren et al., ZeRO-Offload, 2021, table 4: CPU-Adam."""
    assert update_price(update(billions * 1e9, True), DGX_2, 1).seconds == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(("billions", "seconds"), [(1, 1.39), (4, 5.71), (10, 14.76)])
def test_and_pytorchs_operation_by_operation(billions: int, seconds: float) -> None:
    """The same table: PT-CPU."""
    assert update_price(update(billions * 1e9, False), DGX_2, 1).seconds == pytest.approx(seconds, rel=0.07)


@pytest.mark.parametrize(("way", "seconds"), [(HostWay.OUT, 19.477e-3), (HostWay.IN, 19.411e-3)])
def test_a_copy_takes_as_long_as_measured(way: HostWay, seconds: float) -> None:
    """One GiB of pinned memory over PCIe Gen5, on an H200."""
    host = host_of(load_cluster("hgx-h200"))
    assert copy_price(HostCopy(way, int(GIB)), host, 1).seconds == pytest.approx(seconds, rel=0.01)


def test_gpus_that_share_a_link_share_its_rate() -> None:
    """Two GPUs of a GB200 tray to each Grace CPU."""
    host, copy = host_of(load_cluster("gb200-nvl72")), HostCopy(HostWay.OUT, int(GIB))
    alone, four = (copy_price(copy, host, gpus).seconds - host.link.latency_s for gpus in (1, 4))
    assert four == pytest.approx(2 * alone)


@given(st.integers(1, 10**11), st.integers(1, 16), st.sampled_from(["dgx-h100", "gb200-nvl72"]))
def test_nothing_beats_the_wire_or_the_memory(size: int, gpus: int, name: str) -> None:
    host = host_of(load_cluster(name))
    copy = copy_price(HostCopy(HostWay.IN, size), host, gpus).seconds
    assert copy >= size / host.link.bandwidth_bytes_per_s
    assert copy >= size * gpus / host.memory_bandwidth_bytes_per_s
    assert copy <= copy_price(HostCopy(HostWay.IN, size), host, gpus + 1).seconds
    moved = update_price(HostUpdate(size, size), host, gpus).seconds
    assert moved >= 2 * size * gpus / host.memory_bandwidth_bytes_per_s


def test_a_cluster_without_a_description_of_its_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="a40-pcie does not describe its hosts"):
        host_of(load_cluster("a40-pcie"))
