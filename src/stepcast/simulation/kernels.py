"""Loops of the folded engine over flat arrays, compiled by numba once and loaded from then on.

To import numba takes more than a second, in which numpy runs thousands of calls; llvmlite, a part of numba, loads
object code in a tenth of that, and a shared library, which is made where there is a linker, is opened in a thousandth.
Both are cached next to this file or in the user's cache folder, for one kind of processor. Kernels take integers and
flat arrays, return nothing and allocate nothing.
"""

import ctypes
import os
import platform
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray

Kernel = Callable[..., None]
Function = Callable[..., Any]
WORTH_OPENING, WORTH_LOADING, WORTH_COMPILING = 2**10, 2**15, 2**19
"""Calls of segments that are run before a library is opened, which takes 0.5 ms, before object code is loaded, which
takes 0.1 s, and before it is compiled, which takes 5 s, eight times as long as numpy takes for them, but once for all
later processes."""
SYMBOL = "kernel"
"""The name of the compiled function in its file."""
_loaded: dict[Kernel, Kernel | None] = {}
_looked: dict[Kernel, int] = {}  # when to look for the code again, which another process may have compiled by then
_calls = [0]


def find_kernel(function: Kernel, calls: int = 0) -> Kernel | None:
    """Return *function* compiled, if loading or compiling it pays for the calls of segments so far and *calls* more;
    None where it does not pay or numba is not installed.
    """
    _calls[0] += calls
    if function not in _loaded and _calls[0] > _looked.get(function, WORTH_OPENING):
        kernel = _load_cached(function, _calls[0] > WORTH_LOADING)
        if kernel is None and _calls[0] > WORTH_COMPILING:
            kernel = _compile(function)
        if kernel is not None or _calls[0] > WORTH_COMPILING:
            _loaded[function] = kernel
        _looked[function] = 2 * _calls[0]
    return _loaded.get(function)


def _list_files(function: Kernel) -> list[Path]:
    """Return where the object code of *function* may be: in numba's folder if one is set, next to this file, or in the
    user's cache folder.
    """
    code, stated = function.__code__, os.environ.get("NUMBA_CACHE_DIR")
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "stepcast"
    folders = [Path(stated)] if stated else [Path(__file__).parent / "__pycache__", user]
    numbers = [value for value in code.co_consts if not isinstance(value, str)]  # without the docstring
    version = zlib.crc32(repr((code.co_code, numbers, code.co_names, code.co_varnames)).encode(), _number_processor())
    return [folder / f"{function.__name__}-{version:08x}.o" for folder in folders]


@cache
def _number_processor() -> int:
    """Return a number that differs between processors that may not run the same code."""
    lines = [f"model name {sys.platform} {platform.machine()}".encode()]
    with suppress(OSError), open("/proc/cpuinfo", "rb") as file:
        lines += file.read(2**13).partition(b"\n\n")[0].splitlines()  # of the first core
    return zlib.crc32(
        b"".join([line for line in lines if line.startswith((b"model name", b"flags", b"CPU ", b"Features"))])
    )


def _load_cached(function: Kernel, is_worth_loading: bool) -> Kernel | None:
    for file in _list_files(function):
        try:
            library = ctypes.CDLL(os.fspath(file.with_suffix(".so")))
            return _make_call(function, ctypes.cast(library[SYMBOL], ctypes.c_void_p).value or 0)
        except (OSError, AttributeError):  # no such file, or something else
            pass
        try:
            if is_worth_loading:
                return _link(function, zlib.decompress(file.read_bytes()))
        except (OSError, ImportError, RuntimeError, zlib.error):  # also without llvmlite
            continue
    return None


def _compile(function: Kernel) -> Kernel | None:
    """Compile *function*; None without numba or with one that has changed too much, as numpy gives the same times."""
    import subprocess

    try:
        code = _compile_object(function)
    except (ImportError, AttributeError, TypeError):
        return None
    for file in _list_files(function):
        staged, library = (file.with_suffix(f".{os.getpid()}{kind}") for kind in (".o", ".so"))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(code)
            with suppress(FileNotFoundError, subprocess.CalledProcessError):  # without a linker, or where it fails
                subprocess.run(["cc", "-shared", "-nostdlib", "-o", library, staged], check=True, capture_output=True)
                library.replace(file.with_suffix(".so"))
            staged.write_bytes(zlib.compress(code))  # with a check sum: llvmlite crashes with other code
            staged.replace(file)
            break
        except OSError:  # a folder that is read-only, or a full disk
            continue
    return _link(function, code)


def _compile_object(function: Kernel) -> bytes:
    """Return the object code of *function*, compiled as numba does for functions that raise nothing and that Python
    does not call, but such that a linker can move it.
    """
    import numba
    from llvmlite import binding

    core: Any = numba.core
    types, target = core.types, core.registry.cpu_target
    of_kind = {int: types.int64, IntArray: types.CPointer(types.int64), FloatArray: types.CPointer(types.float64)}
    kinds = [of_kind[kind] for name, kind in function.__annotations__.items() if name != "return"]
    flags = core.compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.nrt, flags.error_model = False, "numpy"
    contexts = target.typing_context, target.target_context
    compiled = core.compiler.compile_extra(*contexts, function, kinds, types.void, flags, {})
    module = binding.parse_assembly(compiled.library.get_llvm_str())
    module.get_function(compiled.fndesc.mangled_name).name = SYMBOL
    host = {"cpu": binding.get_host_cpu_name(), "features": binding.get_host_cpu_features().flatten()}
    machine = binding.Target.from_default_triple().create_target_machine(**host, reloc="pic", codemodel="small")
    code: bytes = machine.emit_object(module)
    return code


_engines: list[Any] = []
"""The engines that own the code, which ends with them."""


@cache
def _link(function: Kernel, code: bytes) -> Kernel:
    """Return a call of object *code*."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return _make_call(function, engine.get_function_address(SYMBOL))


def _make_call(function: Kernel, address: int) -> Kernel:
    """Return a call of the code of *function*, whose first two arguments are numba's: results and errors."""
    kinds = [kind for kind_name, kind in function.__annotations__.items() if kind_name != "return"]
    passed = [ctypes.c_int64 if kind is int else ctypes.c_void_p for kind in kinds]
    call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *passed)(address)
    unused, view = ctypes.byref(ctypes.c_void_p()), (ctypes.c_char * 0).from_buffer  # faster than ``ndarray.ctypes``

    def kernel(*arguments: Any) -> None:
        addresses = [argument if type(argument) is int else ctypes.addressof(view(argument)) for argument in arguments]
        call(unused, unused, *addresses)

    return kernel


@cache
def compile_functions(
    functions: tuple[FunctionType, ...], inlined: tuple[FunctionType, ...] = (), counts: bool = True
) -> dict[str, Function]:
    """Return *functions* by name, compiled and cached by numba itself, as those of the other engines are, which take
    tuples of arrays. Each calls only those before it; those *inlined* become part of others. Nothing where numba is not
    installed. *counts*: arrays that a function makes are counted.
    """
    try:
        import numba
        from numba.core.options import DefaultOptions
    except ImportError:
        return {}
    njit: Function = numba.njit
    uncounted = {"_nrt": False} if not counts and hasattr(DefaultOptions, "_nrt") else {}
    # Numba caches what it compiled until the file of a function changes. Each contains what it calls of other files, so
    # all are declared to be of the file that changed last, including this one with its options.
    newest = max({__file__, *(function.__code__.co_filename for function in functions)}, key=_change_time)

    def compile_all(**options: bool) -> dict[str, Function]:
        names: dict[str, Any] = {}
        for function in functions:
            names.update(function.__globals__)
        for function in functions:
            again = FunctionType(function.__code__.replace(co_filename=newest), names, function.__name__)
            again.__module__, again.__qualname__ = function.__module__, function.__qualname__
            inline = "always" if function in inlined else "never"
            names[function.__name__] = njit(again, error_model="numpy", inline=inline, **uncounted, **options)
        return names

    uncached: dict[str, Function] = {}
    try:
        cached = compile_all(cache=True)
    except RuntimeError:  # no folder for the cache, as in a container whose folders are read-only
        cached = compile_all()

    def make_call(name: str) -> Function:
        def call(*arguments: object) -> Any:
            if not uncached:
                try:
                    return cached[name](*arguments)
                except OSError:  # compiled but not cached, as on a full disk; it has not run yet
                    uncached.update(compile_all())
            return uncached[name](*arguments)

        return call

    return {function.__name__: make_call(function.__name__) for function in functions}


def _change_time(file: str) -> tuple[int, str]:
    try:
        return os.stat(file).st_mtime_ns, file
    except OSError:  # in an archive, where numba caches nothing
        return 0, file


# The kernels. Comments name the dimensions of flat arrays.


def find_levels(
    inputs: int,
    ranks: int,
    sources: IntArray,
    starts: IntArray,
    level: IntArray,
    position: IntArray,
    ready: IntArray,
    next_waiting: IntArray,
    first_waiting: IntArray,
) -> None:
    """Fill *level*, all -1 at first, for the calls that can begin. A rank that has to wait continues when the call that
    it waits for has a level.

    *sources* are calls x *inputs*; *position* holds the first call of each rank, *ready* all ranks, the last first, and
    *first_waiting* -1 for each call.
    """
    left = ranks
    while left > 0:
        left -= 1
        rank = ready[left]
        call, blocker = position[rank], -1
        height = level[call - 1] if call > starts[rank] else -1
        while call < starts[rank + 1]:
            for port in range(call * inputs, (call + 1) * inputs):
                source = sources[port]
                if source >= 0:
                    height = max(height, level[source])
                    if level[source] < 0:
                        blocker = source
            if blocker >= 0:
                next_waiting[rank], first_waiting[blocker] = first_waiting[blocker], rank
                break
            height += 1
            level[call] = height
            waiting = first_waiting[call]
            while waiting >= 0:
                ready[left] = waiting
                left += 1
                waiting = next_waiting[waiting]
            call += 1
        position[rank] = call


def fold_chains(
    later: int,
    records: IntArray,
    layout: IntArray,
    starts: IntArray,
    seconds: FloatArray,
    exact_s: FloatArray,
    factors: FloatArray,
    shares: FloatArray,
    slows: FloatArray,
    numbers: IntArray,
    scratch: FloatArray,
    maps: FloatArray,
) -> None:
    """Fill *maps*, chains x columns x rows, as ``fold_chain`` does.

    *records* hold the pieces (``encode_piece``), *layout* the chains (``Program.layout``). *seconds* are those of the
    ops of each piece, one piece after the other, if *later* is negative. Otherwise they are those of works, and of the
    issues of ops so much *later*: the codes of a piece say which its ops take, those of its list begin at *starts*.
    *exact_s*, *factors* (of lists), *shares* and *slows* (of kinds of collectives) then decide what computing loses to
    communication. *numbers* has space for two numbers of each part.
    """
    chains, parts, lanes, inputs, outputs = layout[0], layout[1], layout[2], layout[3], layout[4]
    reads, width, nodes = layout[5], layout[6], layout[7]
    first_part = 8 + chains
    repeats, read = first_part + 2 * parts, first_part + 3 * parts
    columns, rows, square = reads + inputs, reads + outputs, width * width
    values = 2 * parts * square + 2 * width
    state = values + nodes * width
    after = state + (lanes + inputs) * columns
    power = after + width * columns
    product = power + square
    distinct, first_op = 0, 0
    for part in range(parts):
        record, own, repeat = layout[first_part + part], layout[first_part + parts + part], layout[repeats + part]
        matrix = -1
        numbers[part] = numbers[parts + part] = -1
        for other in range(part):
            if layout[first_part + other] == record and layout[first_part + parts + other] == own:
                matrix = numbers[parts + part] = numbers[parts + other]
                if layout[repeats + other] == repeat:
                    numbers[part] = numbers[other]
                    break
        if numbers[part] >= 0:
            continue
        if matrix < 0:
            matrix = numbers[parts + part] = distinct * square
            distinct += 1
            touched, ops = records[record], records[record + 3]
            entries = touched + records[record + 1]
            counts = record + 5 + touched
            place, code = counts + ops, counts + ops + records[record + 4]
            start = starts[own + 1] if later >= 0 else first_op
            for entry in range(entries):
                for column in range(entries):
                    scratch[values + entry * width + column] = 0.0 if entry == column else -np.inf
            for op in range(ops):
                index = start + op
                duration_s = 0.0
                if later >= 0:
                    index = records[code + op]
                    if index == -1:
                        # What computing loses: the windows of collectives, each with the computing that it overlaps.
                        groups, computing = records[code + ops], records[code + ops + 1]
                        works = code + ops + 2
                        window = works + computing + 1
                        computing_s = 0.0
                        for work in range(works, works + computing):
                            computing_s += exact_s[start + records[work]]
                        computing_s *= factors[own + 1]
                        taken = 2 * parts * square
                        for group in range(2 * groups):
                            scratch[taken + group] = 0.0
                        for _ in range(records[works + computing]):
                            kind, group, size = records[window + 1], records[window + 2], records[window + 3]
                            both_s = computing_s
                            if size > 0:
                                both_s = 0.0
                                for work in range(window + 4, window + 4 + size):
                                    both_s += exact_s[start + records[works + records[work]]]
                                both_s *= factors[own + 1]
                            collective_s = exact_s[start + records[window]] * slows[kind]
                            if collective_s < both_s:
                                both_s = collective_s
                            scratch[taken + 2 * group] += both_s
                            scratch[taken + 2 * group + 1] += shares[kind] * both_s
                            window += 4 + size
                        for group in range(groups):
                            both_s = scratch[taken + 2 * group]
                            if both_s > 0.0:
                                duration_s += scratch[taken + 2 * group + 1] * min(1.0, computing_s / both_s)
                        ticks = duration_s * 2.0**46
                        if ticks < 2.0**52:  # the nearest whole number
                            ticks = (ticks + 2.0**52) - 2.0**52
                        duration_s = ticks * 2.0**-46
                    elif index <= -3:
                        index = start + later - index
                    elif index >= 3:
                        index += start
                if index >= 0:
                    duration_s = seconds[index]
                latest = values + (entries + op) * width
                for entry in range(entries):
                    scratch[latest + entry] = -np.inf
                for _ in range(records[counts + op]):
                    node = values + records[place] * width
                    place += 1
                    for entry in range(entries):
                        scratch[latest + entry] = max(scratch[latest + entry], scratch[node + entry])
                for entry in range(entries):
                    scratch[latest + entry] += duration_s
            for row in range(touched + records[record + 2]):
                node = values + records[place] * width
                place += 1
                for entry in range(entries):
                    scratch[matrix + row * width + entry] = scratch[node + entry]
            first_op += ops
        numbers[part] = matrix
        if repeat > 1:  # a power of the matrix, by repeated squaring, in the next place
            numbers[part] = result = distinct * square
            distinct += 1
            touched, begun = records[record], 0
            for place in range(square):
                scratch[power + place] = scratch[matrix + place]
            while repeat > 0:
                if repeat % 2 and not begun:
                    begun = 1
                    for place in range(square):
                        scratch[result + place] = scratch[power + place]
                    repeat -= 1
                # The result followed by the power, or the power by itself.
                one = result if repeat % 2 else power
                for row in range(touched if repeat > 0 else 0):
                    for column in range(touched):
                        scratch[product + row * width + column] = -np.inf
                    for middle in range(touched):
                        seconds_s = scratch[power + row * width + middle]
                        if seconds_s > -np.inf:
                            for column in range(touched):
                                to, by = product + row * width + column, one + middle * width + column
                                scratch[to] = max(scratch[to], seconds_s + scratch[by])
                for row in range(touched if repeat > 0 else 0):
                    for column in range(touched):
                        scratch[one + row * width + column] = scratch[product + row * width + column]
                repeat = repeat - 1 if repeat % 2 else repeat // 2
    first = 0
    for chain in range(chains):
        for place in range((lanes + inputs) * columns):
            scratch[state + place] = -np.inf
        for column in range(columns):
            lane = layout[read + column] if column < reads else lanes + column - reads
            scratch[state + lane * columns + column] = 0.0
        left = chain * columns * rows
        for place in range(left, left + columns * rows):
            maps[place] = -np.inf
        given = reads
        for part in range(first, first + layout[8 + chain]):
            record, matrix = layout[first_part + part], numbers[part]
            touched, exits = records[record], records[record] + records[record + 2]
            for place in range(exits * columns):
                scratch[after + place] = -np.inf
            for entry in range(touched + records[record + 1]):
                lane = records[record + 5 + entry] if entry < touched else lanes + entry - touched
                for row in range(exits):
                    added_s = scratch[matrix + row * width + entry]
                    if added_s > -np.inf:
                        for column in range(columns):
                            to, by = after + row * columns + column, state + lane * columns + column
                            scratch[to] = max(scratch[to], added_s + scratch[by])
            for row in range(exits):
                for column in range(columns):
                    value = scratch[after + row * columns + column]
                    if row < touched:
                        scratch[state + records[record + 5 + row] * columns + column] = value
                    else:
                        maps[left + column * rows + given] = value
                given += row >= touched
        for row in range(reads):
            for column in range(columns):
                maps[left + column * rows + row] = scratch[state + layout[read + row] * columns + column]
        first += layout[8 + chain]


def run_calls(
    first: int,
    middle: int,
    end: int,
    count: int,
    calls: int,
    lanes: int,
    columns: int,
    rows: int,
    waits: IntArray,
    ports: IntArray,
    chain: IntArray,
    maps: FloatArray,
    values: FloatArray,
    times_s: FloatArray,
    speeds: FloatArray,
) -> None:
    """Fill *values* for the calls from *first* to *end*, then those from *middle* *count* times more, as
    ``_Sweep.repeat`` does. *waits* and *ports* are those of ``CallPlan``, *maps* chains x *columns* x *rows*, *values*
    calls x *rows* after those of the start; *times_s* has space for each column, *speeds* a 0 for each value of a
    period.
    """
    size = (end - middle) * rows
    later = (1 + middle) * rows
    earlier = later - size
    while True:
        for call in range(first, end):
            left = waits[call] * rows
            for lane in range(lanes):
                times_s[lane] = values[left + lane]
            for port in range(columns - lanes):
                left = waits[(1 + port) * calls + call] * rows + lanes + ports[port * calls + call]
                times_s[lanes + port] = values[left]
            left, row = (1 + call) * rows, 0
            while row < rows:
                place = chain[call] * columns * rows + row
                if row + 4 <= rows:  # four rows at once, which processors add and compare together
                    first_s = second_s = third_s = fourth_s = -np.inf
                    for column in range(columns):
                        time_s = times_s[column]
                        value = maps[place] + time_s
                        first_s = value if value > first_s else first_s
                        value = maps[place + 1] + time_s
                        second_s = value if value > second_s else second_s
                        value = maps[place + 2] + time_s
                        third_s = value if value > third_s else third_s
                        value = maps[place + 3] + time_s
                        fourth_s = value if value > fourth_s else fourth_s
                        place += rows
                    values[left + row], values[left + row + 1] = first_s, second_s
                    values[left + row + 2], values[left + row + 3] = third_s, fourth_s
                    row += 4
                else:
                    first_s = -np.inf
                    for column in range(columns):
                        value = maps[place] + times_s[column]
                        first_s = value if value > first_s else first_s
                        place += rows
                    values[left + row] = first_s
                    row += 1
        leap, latest_s = count, 0.0
        for place in range(size if count else 0):
            latest_s = max(latest_s, values[later + place])
        slack_s = 0.0 if latest_s < 128.0 else latest_s * 2.0**-40
        for place in range(size if count else 0):
            is_finite = values[later + place] > -np.inf
            speed = values[later + place] - values[earlier + place] if is_finite else 0.0
            if abs(speed - speeds[place]) > slack_s:
                leap = 0
            speeds[place] = speed
        for call in range(middle, end if leap else 0):
            for column in range(columns):
                entry = waits[call] * rows + column
                if column >= lanes:
                    port = column - lanes
                    entry = waits[(1 + port) * calls + call] * rows + lanes + ports[port * calls + call]
                speed = speeds[(entry - earlier) % size] if entry >= rows else 0.0
                for row in range(rows):
                    place = (1 + call) * rows + row
                    added_s = maps[(chain[call] * columns + column) * rows + row]
                    gain = speed - speeds[place - later]
                    if gain > slack_s and added_s > -np.inf:
                        gap_s = values[place] - (added_s + values[entry])
                        if gap_s < leap * gain:
                            leap = int(gap_s / gain)
                            leap -= leap * gain > gap_s
        for place in range(size if leap else 0):
            values[earlier + place] += leap * speeds[place]
            values[later + place] += leap * speeds[place]
        if count == leap:
            return
        for place in range(size):
            values[earlier + place] = values[later + place]
        first, count = middle, count - leap - 1
