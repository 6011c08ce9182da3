"""Let a training script see a machine that is not there: its GPUs, a process group of any size, wrappers of models.

Data parallelism, sharding, tensor parallelism and compilation are noted, not carried out: the captured step is that
of one rank, and a prediction distributes it. Collectives that the script calls itself are counted.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.utils.data._utils.pin_memory import pin_memory

from stepcast.hardware.catalog import load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.inputs.source import read_words
from stepcast.ir.types import dataclass
from stepcast.pytorch.capture.emulation import GPU
from stepcast.pytorch.capture.tracer import DTYPES, CaptureError, TracedUnit

GPUS_PER_NODE = 8
DESCRIBED = 1000  # batches of a loader whose batches are described
# Functions of PyTorch by what becomes of them, and compute capabilities by architecture.
CALLS = {name: words.split() for table in read_words("pytorch").values() for name, words in table.items()}


class ShardedModules(NamedTuple):
    """Modules that one call of ``fully_shard`` or FSDP shards together."""

    modules: list[nn.Module]
    precision: object = None  # its mixed precision
    is_freed: bool | None = None  # after the forward; None: unless it is the outermost
    is_flat: bool = False  # parameters are one tensor (FSDP 1)


def _answer(value: object) -> Callable[..., object]:
    return lambda *args, **kwargs: value


@dataclass
class PretendMachine:
    """The GPUs that a script is shown, and what it asked of them."""

    gpus: int = 1
    gpu: Gpu = field(default_factory=lambda: load_gpu("h100-sxm"))
    sharding: str = ""  # "none" for DDP, "fsdp"; "" for one GPU
    tp: int = 1
    bucket_mb: float | None = None
    ddp: str | None = None  # whether gradients are "copies" of DDP's buckets or "views"
    skips_sums: bool = False  # whether the script lets DDP sum no gradients in some passes (``no_sync``)
    collectives: Counter[str] = field(default_factory=Counter)
    units: list[ShardedModules] = field(default_factory=list)  # inner ones first
    notes: dict[str, None] = field(default_factory=dict)  # in the order in which they came up
    compiled: set[int] = field(default_factory=set)  # ids of modules
    call_compiled: Callable[[Callable[[], Any]], Any] = lambda call: call()  # runs a compiled function
    batch: list[tuple[str, tuple[int, ...], torch.dtype]] = field(default_factory=list)  # that loaders yield

    def note(self, text: str) -> None:
        self.notes[text] = None

    @contextlib.contextmanager
    def show(self) -> Iterator[None]:
        """Replace what PyTorch says of the machine, as long as the script runs."""
        ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": self.gpus, "LOCAL_WORLD_SIZE": self._local_gpus}
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        environment = {name: str(value) for name, value in (*ranks.items(), *address.items())} if self.gpus > 1 else {}
        with contextlib.ExitStack() as patches, mock.patch.dict(os.environ, environment):
            for owner, name, value in (*self._cuda(), *self._distributed(), *self._wrappers()):
                if hasattr(owner, name):
                    patches.enter_context(mock.patch.object(owner, name, value))
            try:
                yield
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

    @property
    def _local_gpus(self) -> int:
        return min(self.gpus, GPUS_PER_NODE)

    def _cuda(self) -> Iterator[tuple[object, str, object]]:
        cuda, accelerator = torch.cuda, getattr(torch, "accelerator", None)
        gpu, name, memory = self.gpu, f"{self.gpu.vendor} {self.gpu.name}".upper(), round(self.gpu.memory_bytes)
        major, minor = map(int, CALLS.get(gpu.architecture, CALLS["hopper"]))
        properties = SimpleNamespace(
            name=name, total_memory=memory, major=major, minor=minor, multi_processor_count=gpu.sms,
            L2_cache_size=round(gpu.l2_bytes), warp_size=32, max_threads_per_multi_processor=2048,
        )  # fmt: skip
        state = torch.zeros(16, dtype=torch.uint8)
        answers: dict[str, object] = {
            **dict.fromkeys(CALLS["nothing"]), **dict.fromkeys(CALLS["zeros"], 0), **dict.fromkeys(CALLS["true"], True),
            "device_count": self._local_gpus, "get_device_name": name, "get_device_capability": (major, minor),
            "is_bf16_supported": major >= 8, "get_device_properties": properties, "mem_get_info": (memory, memory),
            "memory_summary": "", "memory_stats": Counter[str](), "get_arch_list": [f"sm_{major}{minor}"],
            "is_current_stream_capturing": False, "get_rng_state": state, "get_rng_state_all": [state],
        }  # fmt: skip
        for owner, kind in ((cuda, "handles"), (cuda.nvtx, "ranges")):
            yield from ((owner, name, _Handle) for name in CALLS[kind])
        accelerated = {name: answers[name] for name in CALLS["accelerated"]}
        accelerated |= {"current_accelerator": torch.device(GPU), "current_stream": _Handle()}
        for owner, known in ((cuda, answers), (accelerator, accelerated)):
            yield from ((owner, question, _answer(answer)) for question, answer in known.items())
        yield torch, "Generator", HostGenerator
        compared = {"default": lambda tensor: (tensor.shape, tensor.dtype), "none": lambda tensor: None}
        yield torch.utils.checkpoint, "_allowed_determinism_checks_to_fns", compared
        yield torch, "compile", self._compile
        unsaved = "torch.save wrote nothing: a captured step has no values"
        yield torch, "save", lambda *args, **kwargs: self.note(unsaved)
        loader = torch.utils.data.DataLoader.__init__
        here = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None,
                "timeout": 0, "multiprocessing_context": None}  # fmt: skip

        def load_in_this_process(own: Any, *args: Any, **kwargs: Any) -> None:
            loader(own, *args[:4], **{**kwargs, **{name: here[name] for name in here if name in kwargs}})
            join, own.pin = own.collate_fn, pin_memory if kwargs.get("pin_memory") else lambda batch: batch
            own.collate_fn = lambda samples: own.pin(join(samples))

        yield torch.utils.data.DataLoader, "__init__", load_in_this_process
        if self.batch:
            yield torch.utils.data.DataLoader, "__iter__", lambda own: map(own.pin, self._make_batches())
            yield torch.utils.data.DataLoader, "__len__", _answer(DESCRIBED)

    def _make_batches(self) -> Iterator[object]:
        """Yield batches of the described shapes: by name, or in a list; one tensor by itself."""
        for _ in range(DESCRIBED):
            tensors = [torch.ones(shape, dtype=dtype) for _, shape, dtype in self.batch]
            if self.batch[0][0]:
                yield {name: tensor for (name, _, _), tensor in zip(self.batch, tensors, strict=True)}
            else:
                yield tensors if len(tensors) > 1 else tensors[0]

    def _compile(self, model: Any = None, **options: Any) -> Any:
        """Note that *model*, a module or a function, runs compiled."""
        if model is None:
            return self._compile
        if isinstance(model, nn.Module):
            self.compiled.add(id(model))
            object.__setattr__(model, "_orig_mod", model)
            return model

        def run_compiled(*args: Any, **kwargs: Any) -> Any:
            self.compiled.add(0)
            return self.call_compiled(lambda: model(*args, **kwargs))

        return run_compiled

    def _distributed(self) -> Iterator[tuple[object, str, object]]:
        import torch.distributed.device_mesh as meshes
        import torch.distributed.distributed_c10d as native

        start = dist.init_process_group

        def initialise(*args: object, **kwargs: object) -> None:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            if not dist.is_initialized():
                start("fake", store=FakeStore(), rank=0, world_size=self.gpus)

        for module in (dist, native, meshes):
            yield module, "init_process_group", initialise
            yield module, "is_nccl_available", lambda: True
            for name in CALLS["counted"]:
                yield module, name, self._collective(name)
            for name in CALLS["ignored"]:
                yield module, name, _answer(None)
            yield module, "all_gather_object", _gather_object
        yield torch.multiprocessing, "spawn", self._spawn

    def _spawn(self, run: Callable[..., object], args: tuple[object, ...] = (), nprocs: int = 1, **_: object) -> None:
        """Run the first of the processes that a script starts itself, one on each GPU, in this one."""
        self.gpus = max(self.gpus, nprocs)
        run(0, *args)

    def _collective(self, name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            self.collectives[name] += 1
            for output in args[:1] if isinstance(args[0], list) else ():
                for tensor in output if isinstance(output, list) else ():
                    tensor.detach().copy_(args[1])
            return _Handle() if kwargs.get("async_op") or name.startswith("i") else None

        return call

    def _wrappers(self) -> Iterator[tuple[object, str, object]]:
        import torch.distributed.fsdp as fsdp
        import torch.distributed.fsdp.wrap as wrap
        import torch.distributed.tensor.parallel as parallel

        machine = self

        class DistributedDataParallel(_WrappedModule):
            def __init__(
                self, module: nn.Module, *args: object, bucket_cap_mb: float | None = None,
                gradient_as_bucket_view: bool = False, **kwargs: object,
            ) -> None:  # fmt: skip
                super().__init__(module)
                machine.sharding, machine.bucket_mb = machine.sharding or "none", bucket_cap_mb
                machine.ddp = "views" if gradient_as_bucket_view else "copies"

            def no_sync(self) -> contextlib.AbstractContextManager[None]:
                machine.skips_sums = True
                return contextlib.nullcontext()

            def __setattr__(self, name: str, value: Any) -> None:
                machine.skips_sums |= name == "require_backward_grad_sync"
                super().__setattr__(name, value)

        class FullyShardedDataParallel(_WrappedModule):
            def __init__(
                self, module: nn.Module, process_group: object = None, sharding_strategy: object = None,
                cpu_offload: object = None, auto_wrap_policy: Any = None, backward_prefetch: object = None,
                mixed_precision: object = None, *args: object, **kwargs: object,
            ) -> None:  # fmt: skip
                super().__init__(module.to(GPU))
                strategy = str(sharding_strategy or "FULL_SHARD").rpartition(".")[2]

                class Wrapped(nn.Module):  # type: ignore[misc]
                    """Notes a module that is wrapped, which stays as it is."""

                    def __new__(cls, inner: nn.Module, **_: object) -> Any:
                        machine.shard(strategy, ShardedModules([inner], mixed_precision, is_flat=True))
                        return inner

                if auto_wrap_policy is not None:
                    nothing: set[Any] = set()
                    wrap._recursive_wrap(module, auto_wrap_policy, Wrapped, nothing, nothing, True)
                Wrapped(module)

        def fully_shard(
            module: Any, *, mesh: Any = None, reshard_after_forward: Any = None, mp_policy: object = None, **kw: object
        ) -> Any:
            modules = module if isinstance(module, list) else [module]
            is_hybrid = mesh is not None and mesh.ndim > 1
            strategy = "HYBRID_SHARD" if is_hybrid else f"reshard_after_forward={reshard_after_forward}"
            is_known = not is_hybrid and reshard_after_forward in (None, True, False)
            unit = ShardedModules(modules, mp_policy, reshard_after_forward)
            machine.shard("FULL_SHARD" if is_known else strategy, unit)
            for own in modules:
                own.__class__ = type(f"FSDP{type(own).__name__}", (_ShardedMethods, type(own)), {})
            return module

        def parallelize_module(
            module: nn.Module, device_mesh: Any = None, *args: object, **kwargs: object
        ) -> nn.Module:
            machine.tp = device_mesh.size() if device_mesh is not None else machine.gpus
            machine.note("the tensor-parallel plan is replaced by the split that predict --tp finds")
            return module

        for own in (DistributedDataParallel, FullyShardedDataParallel, fully_shard, parallelize_module):
            for owner in (nn.parallel, nn.parallel.distributed, fsdp, fsdp.fully_sharded_data_parallel, parallel):
                yield owner, own.__name__, own

    def shard(self, strategy: str, unit: ShardedModules) -> None:
        """Note the sharding of FSDP; the variants that a prediction lacks are predicted as full shards."""
        self.sharding = "none" if strategy == "NO_SHARD" else "fsdp"
        self.units.append(unit._replace(is_freed=False) if strategy == "SHARD_GRAD_OP" else unit)
        for module in unit.modules:
            _cast_in_forward(module, getattr(unit.precision, "param_dtype", None))
        if strategy not in ("NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"):
            self.note(f"FSDP with {strategy} is predicted as full sharding over all replicas")

    def list_units(self, names: Mapping[int, str]) -> Iterator[TracedUnit]:
        """Yield the units of FSDP by the *names* of their modules.

        A unit has the parameters that no inner unit has; the outermost keeps them after its forward. ``fully_shard``
        pads the rows of each parameter to a multiple of the ranks.
        """
        ways, claimed = self.gpus // self.tp, set[int]()
        for unit in self.units:
            own = {id(weight): weight for module in unit.modules for weight in module.parameters()}
            param_dtype, reduce_dtype = (getattr(unit.precision, f"{use}_dtype", None) for use in ("param", "reduce"))
            gathered_bytes = reduced_bytes = 0
            for weight in (weight for key, weight in own.items() if key not in claimed):
                rows = weight.shape[0] if weight.dim() and not unit.is_flat else weight.numel()
                padded = -(-rows // ways) * ways if not unit.is_flat else rows
                dtype, elements = param_dtype or weight.dtype, weight.numel() // max(1, rows) * padded
                gathered_bytes += elements * dtype.itemsize
                reduced_bytes += elements * (reduce_dtype or dtype).itemsize * weight.requires_grad
            claimed |= own.keys()
            ids = {id(module) for module in unit.modules}
            is_outermost = not any(
                ids < {id(module) for top in other.modules for module in top.modules()} for other in self.units
                if other is not unit
            )  # fmt: skip
            is_freed = not is_outermost if unit.is_freed is None or (unit.is_flat and is_outermost) else unit.is_freed
            known = tuple(names[key] for key in ids if key in names)
            if gathered_bytes and known:
                yield TracedUnit(known, gathered_bytes, reduced_bytes, is_freed)


class HostGenerator(torch.Generator):  # type: ignore[misc]
    """A generator of the host, whatever device was asked for."""

    def __new__(cls, device: object = None) -> "HostGenerator":
        own: HostGenerator = super().__new__(cls)
        return own


class _Handle:
    """A stream, an event, a range or a pending collective: every call on it does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device(GPU)

    def __enter__(self) -> "_Handle":
        return self

    __exit__, query, is_capturing = _answer(None), _answer(True), _answer(False)
    elapsed_time = _answer(1.0)

    def __getattr__(self, name: str) -> Callable[..., "_Handle"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


class _WrappedModule(nn.Module):  # type: ignore[misc]
    """A model in a wrapper that distributes it; here it runs as it is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    no_sync = join = state_dict_type = staticmethod(_answer(contextlib.nullcontext()))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)


class _ShardedMethods:
    """Methods of a module after ``fully_shard``, which change nothing in a captured step."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("set_", "unshard", "reshard", "register_fsdp")):
            return lambda *args, **kwargs: None
        return super().__getattr__(name)  # type: ignore[misc]


def _cast_in_forward(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Run *module* with its parameters and inputs as *dtype*, as mixed precision of FSDP does.

    Parameters of inner modules that are cast already are left to these.
    """
    if dtype is None:
        return
    owners = [(own, name) for own in module.modules() for name in own._parameters if not hasattr(own, "_stepcast_cast")]
    for own, _ in owners:
        object.__setattr__(own, "_stepcast_cast", True)
    masters: list[tuple[nn.Module, str, nn.Parameter]] = []

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        for own, name in owners:
            master = own._parameters.get(name)
            if master is not None:
                masters.append((own, name, master))
                del own._parameters[name]
                object.__setattr__(own, name, cast(master))
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    def leave(*_: object) -> None:
        for own, name, master in masters:
            object.__delattr__(own, name)
            own._parameters[name] = master
        masters.clear()

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def _gather_object(objects: list[object], own: object, group: object = None) -> None:
    objects[:] = [own] * len(objects)


def read_shapes(text: str) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return name, shape and type of each tensor of a batch, such as ``64x3x224x224,64:int64`` or
    ``input_ids=8x1024:int64,labels=8x1024:int64``; floats are fp32 unless they say otherwise.
    """
    tensors = []
    for part in filter(None, text.split(",")):
        name, _, rest = part.rpartition("=")
        sizes, _, kind = rest.partition(":")
        dtype = next((dtype for dtype, own in DTYPES.items() if own == (kind or "fp32")), None)
        if dtype is None or not all(size.isdigit() and int(size) for size in sizes.split("x")):
            raise CaptureError(f"--batch {part}: expected sizes and a type, such as 64x3x224x224:fp32 or 64:int64")
        tensors.append((name, tuple(map(int, sizes.split("x"))), dtype))
    if len({bool(name) for name, _, _ in tensors}) > 1:
        raise CaptureError(f"--batch {text}: name all tensors, as in input_ids=8x1024:int64, or none")
    return tensors


def sizes_of(inputs: Any) -> tuple[int, int]:
    """Return the sequences of *inputs* and the tokens of each.

    Sequences are the first dimension; tokens the second, of integers by sequence and position and of vectors by
    both. Other samples count as one token each.
    """
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    first = next((tensor for tensor in tensors if tensor.dim()), None)
    if first is None:
        return 1, 1
    by_token = first.dim() == (3 if first.is_floating_point() else 2)
    return max(1, first.shape[0]), max(1, first.shape[1]) if by_token else 1


def read_command(words: Sequence[str]) -> tuple[list[str], int]:
    """Return the Python words of a command, a file or ``-m module`` with its arguments, and its number of processes.

    ``python``, ``torchrun``, ``accelerate launch`` and ``deepspeed`` may start it.
    """
    starter, rest = os.path.basename(words[0]), list(words[1:])
    if starter.endswith(".py"):
        return list(words), 1
    if starter.startswith("python"):
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            if rest[0] == "-c":
                raise CaptureError("python -c: write the program to a file, whose lines messages can name")
            del rest[: 1 + (rest[0] in ("-W", "-X"))]  # such as -u, and -W ignore
        if rest[:2] not in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            return rest, 1
        rest = rest[2:]
    elif starter == "accelerate":
        rest = rest[1:]
    counts = {"nnodes": 1, "nproc_per_node": 1, "num_processes": 1, "num_machines": 1, "num_gpus": 1}
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        name, _, value = rest.pop(0).lstrip("-").replace("-", "_").partition("=")
        takes_value = not value and rest and not rest[0].startswith("-") and not rest[0].endswith(".py")
        value = rest.pop(0) if takes_value else value
        if name in counts:
            counts[name] = int(value) if value.isdigit() else GPUS_PER_NODE
    return rest, max(counts["nnodes"] * max(counts["nproc_per_node"], counts["num_gpus"]), counts["num_processes"])
