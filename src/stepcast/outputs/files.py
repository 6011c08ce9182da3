"""The one place that writes files: each is there completely, or as it was before.

A file is written under a hidden name next to its target, brought to the disk, and takes the target's place in
one step. A kill, a full disk or a limit on the size of files then cost the new file and never the old one.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

# Of the target's name, so that the hidden one is within the 255 bytes that file systems allow.
NAME_BYTES = 200
PIECE_BYTES = 16 * 2**20
# Files there are devices and open files of this process, and none can be replaced.
DEVICES = ("/dev/", "/proc/")

_unfinished: set[str] = set()


class _StagedFile(NamedTuple):
    """A file that waits next to its target, under the name a user gave."""

    hidden: str
    target: str
    name: str


def write_file(name: str, data: bytes) -> int:
    """Write *data*, compressed where the name ends in .gz; return the bytes written."""
    return write_files([(name, data)])[0]


def write_files(files: Iterable[tuple[str, bytes]]) -> list[int]:
    """Write *files*, all or none, as :func:`write_file` does; return the bytes of each."""
    staged: list[_StagedFile] = []
    sizes = []
    try:
        for name, data in files:
            if name.endswith(".gz"):
                import gzip

                data = gzip.compress(data, mtime=0)
            with _name_errors(name):
                if waiting := _stage(name, data):
                    staged.append(waiting)
            sizes.append(len(data))
        for file in staged:
            with _name_errors(file.name):
                os.replace(file.hidden, file.target)
            _unfinished.discard(file.hidden)
        for folder in {os.path.dirname(file.target) for file in staged}:
            _sync_folder(folder)
    finally:
        discard_unfinished(staged)
    return sizes


def discard_unfinished(staged: Sequence[_StagedFile] | None = None) -> None:
    """Remove the hidden files of *staged*, or all that this process has not finished."""
    for hidden in [*_unfinished] if staged is None else [file.hidden for file in staged]:
        if hidden in _unfinished:
            _unfinished.discard(hidden)
            with contextlib.suppress(OSError):
                os.unlink(hidden)


def file_identity(path: str | int) -> tuple[int, int] | None:
    """Return the identity of a file under any name: its device and its number there; None where there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def hold(name: str) -> int | None:
    """Lock a file for this process until it ends, however that happens; return None if another holds it."""
    lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # a system that has no such locks
        return lock
    except OSError:
        os.close(lock)
        return None
    return lock


def unwritable(name: str) -> str:
    """Return why no file *name* can be written; nothing where it can."""
    folder = os.path.dirname(name) or "."
    if os.path.isdir(name):
        return "is a folder; expected the name of a file to write"
    if not os.path.isdir(folder):
        return f"there is no folder {folder}; create it first"
    if os.path.exists(name) and not os.access(name, os.W_OK):
        return "cannot be written: permission denied; choose another place"
    if not _is_device(name) and not os.access(os.path.dirname(os.path.realpath(name)), os.W_OK):
        return "cannot be written: permission denied in its folder; choose another place"
    return ""


@contextlib.contextmanager
def _name_errors(name: str) -> Iterator[None]:
    """Let errors of the system name the file as the user does, and state that nothing was lost."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = (error.strerror or "cannot be written").lower()
        raise OSError(error.errno, f"{reason}; the file is left as it was", name) from None


def _is_device(name: str) -> bool:
    """Return whether *name* is a device, a pipe or an open file of this process."""
    with contextlib.suppress(OSError):
        return name.startswith(DEVICES) or not stat.S_ISREG(os.stat(name).st_mode)
    return False


def _stage(name: str, data: bytes) -> _StagedFile | None:
    """Write *data* next to its target; into a device or a pipe at once, and nothing waits."""
    if _is_device(name):
        with open(name, "wb", buffering=0) as device:
            _write_all(device.fileno(), data)
        return None
    target = os.path.realpath(name)  # a link keeps pointing where it does
    hidden, handle = _create_hidden(target)
    try:
        _write_all(handle, data)
        with contextlib.suppress(OSError):  # the permissions of the old file, and its owner where that is allowed
            old = os.stat(target)
            os.fchmod(handle, stat.S_IMODE(old.st_mode))
            os.fchown(handle, old.st_uid, old.st_gid)
        os.fsync(handle)
    except BaseException:
        discard_unfinished([_StagedFile(hidden, target, name)])
        raise
    finally:
        os.close(handle)
    return _StagedFile(hidden, target, name)


def _create_hidden(target: str) -> tuple[str, int]:
    folder, base = os.path.split(target)
    short = os.fsdecode(os.fsencode(base)[:NAME_BYTES])
    for number in count():
        hidden = os.path.join(folder, f".{short}.{os.getpid()}-{number}.part")
        _unfinished.add(hidden)
        try:
            return hidden, os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except BaseException as error:
            _unfinished.discard(hidden)
            if not isinstance(error, FileExistsError):  # left by a process of this number that was killed
                raise
    raise AssertionError("numbers do not end")


def _write_all(handle: int, data: bytes) -> None:
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[os.write(handle, remaining[:PIECE_BYTES]) :]


def _sync_folder(folder: str) -> None:
    """Bring the new name to the disk too; not every system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
