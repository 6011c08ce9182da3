"""What an event of a profiler trace is: by its category, and on a device by its name.

Categories are those of Kineto's ``ActivityType`` (libkineto/include/ActivityType.h). Vendors' forks put the
word of their device in place of ``gpu`` or ``cuda`` (``mlu_memcpy`` of Cambricon, ``GCU_MEMCPY`` of
Enflame).
"""

import re
from enum import Enum
from functools import cache

import msgspec


class Role(Enum):
    HOST = "host"
    CALL = "call"  # of the host to a device's runtime or driver: it may launch work
    KERNEL = "kernel"
    COPY = "copy"
    COMMUNICATION = "communication"
    ANNOTATION = "annotation"
    OVERHEAD = "overhead"
    FRAME = "frame"  # the profiler's own, around the whole trace
    OTHER = "other"


DEVICE = frozenset({Role.KERNEL, Role.COPY, Role.COMMUNICATION})
ON_HOST = frozenset({Role.HOST, Role.CALL})
CORRELATED = DEVICE | {Role.CALL}

# In lower case, as PyTorch 1.8 to 1.11 write capitals.
CATEGORIES: tuple[tuple[Role, re.Pattern[str]], ...] = tuple(
    (role, re.compile(pattern))
    for role, pattern in (
        (Role.HOST, r"cpu_op|operator|user_annotation|python_function"),
        (Role.CALL, r"(?:[a-z0-9]+_)?(?:runtime|driver)"),
        (Role.KERNEL, r"kernel|mtia_ccp_events"),
        (Role.COPY, r"(?:[a-z0-9]+_)?mem(?:cpy|set)"),
        (Role.COMMUNICATION, r"collective_comm"),
        (Role.ANNOTATION, r"[a-z0-9]+_user_annotation"),
        (Role.OVERHEAD, r"overhead"),
        (Role.FRAME, r"trace"),
    )
)
# Libraries that communicate from kernels, by the words in these kernels' names: NCCL and its kin of other
# vendors, MSCCL, NVSHMEM, DeepEP, Transformer Engine's buffers, PyTorch's symmetric memory, vLLM's
# all-reduce.
COMM_KERNEL = re.compile(
    r"nccl|rccl|hccl|xccl|oneccl|mccl|cncl|msccl|nvshmem|deep_?ep(?=_|:|\b)|userbuffers|"
    r"(?:one|two)_shot_(?:all_)?reduce|multimem_(?:one_shot_)?all_|cross_device_reduce",
    re.IGNORECASE,
)
# As CUPTI, roctracer and XPU's plugin name copies, for devices that put all their work into one category.
COPY_NAME = re.compile(
    r"Mem(?:cpy|set)\b|Copy(?:Host|Device)To(?:Host|Device)|[a-z]{2,4}Mem(?:cpy|set)(?![a-z])"
)
# Gaudi has one category for calls and for its engines; an engine's event names itself in its arguments.
GAUDI = "hpu_op"
GAUDI_ENGINE = re.compile(rb'"HW event name"\s*:\s*"[^"]*?(TPC|MME|DMA|NIC)', re.IGNORECASE)
GAUDI_CATEGORIES = {
    b"TPC": "kernel",
    b"MME": "kernel",
    b"DMA": "gpu_memcpy",
    b"NIC": "collective_comm",
}


@cache
def role_of(category: str) -> Role:
    lower = category.lower()
    return next((role for role, pattern in CATEGORIES if pattern.fullmatch(lower)), Role.OTHER)


def gaudi_category(args: msgspec.Raw) -> str:
    """The category that another device would give to a Gaudi's event."""
    engine = GAUDI_ENGINE.search(bytes(args)) if args else None
    return GAUDI_CATEGORIES[engine[1].upper()] if engine else "hpu_runtime"


def role_of_kernel(name: str) -> Role:
    """A copy or a communication where the name of a device's work says so."""
    if COMM_KERNEL.search(name):
        return Role.COMMUNICATION
    return Role.COPY if COPY_NAME.match(name) else Role.KERNEL
