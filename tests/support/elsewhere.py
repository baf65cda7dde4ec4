"""Windows and macOS, as far as they can be faked on Linux, by the system's name in the environment (``FAKED_SYSTEM``).

What only Linux has is gone, and for Windows what POSIX alone has. What Windows refuses is refused: files are renamed
and removed only while nobody has them open or mapped, a rename replaces nothing, folders are not opened, only what is
open for writing is flushed, text written without ``newline`` gets its ends of lines, links need a right that users
lack. Libraries beneath are built for the system that they run on and keep what they need. Importing this module is
enough, so that worker processes live there too.
"""

import builtins
import ctypes
import errno
import fcntl
import os
import pathlib
import shutil
import signal
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "bf16_to_fp16"
MODULES = ("fcntl", "resource", "pwd", "grp", "termios")
FUNCTIONS = (
    *("pread", "preadv", "pwrite", "pwritev", "readv", "writev", "posix_fadvise"),
    *("fchmod", "fchown", "chown", "getuid", "geteuid", "getgid", "getpgid", "killpg", "setsid", "nice", "mkfifo"),
    *("sysconf", "fork", "sendfile", "copy_file_range", "sync"),
    *("O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC", "O_DSYNC"),
)
LINUX_ONLY = ("fdatasync", "sched_getaffinity", "sched_setaffinity", "O_DIRECT")
SIGNALS = ("SIGKILL", "SIGPIPE", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGQUIT")
BINARY, TEMPORARY = 1 << 28, 1 << 29


def ours(depth: int = 2) -> bool:
    """Return whether the caller of the function that asks belongs to the package."""
    return str(sys._getframe(depth).f_globals.get("__name__")).partition(".")[0] == PACKAGE


def in_use(path: str) -> bool:
    """Return whether this process has a file open or mapped that is at a path or below it."""
    if path.startswith("/dev/shm/"):  # where multiprocessing shares memory here
        return False
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the one that lists them
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        names += [line.split(maxsplit=5)[-1].strip() for line in maps if path in line]
    return any(name == path or name.startswith(f"{path}/") for name in names)


def refuse_where_in_use(name: str, *, replaces: bool = True) -> None:
    """Have a call of the os module fail for paths in use, and unless it ``replaces`` also where there is a target."""
    call = getattr(os, name)

    def refusing(*paths: Any, **given: Any) -> Any:
        for path in map(os.path.realpath, paths):
            if in_use(path):
                raise PermissionError(errno.EACCES, "used by another process", path)
        if not replaces and os.path.lexists(paths[1]):
            raise FileExistsError(errno.EEXIST, "exists already", os.fspath(paths[1]))
        return call(*paths, **given)

    setattr(os, name, refusing)


def refuse_what_windows_cannot_open() -> None:
    """Have the package open files as bytes, no folders, and have what is temporary removed when it is closed."""
    opened, closed, synced = os.open, os.close, os.fsync
    temporary: dict[int, str] = {}

    def open_(path: Any, flags: int, mode: int = 0o777, **given: Any) -> int:
        if ours() and os.fspath(path) != os.devnull:
            assert flags & BINARY, f"{path} is opened as text"
            if os.path.isdir(path):
                raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        descriptor = opened(path, flags & ~(BINARY | TEMPORARY), mode, **given)
        if flags & TEMPORARY:
            temporary[descriptor] = os.fspath(path)
        return descriptor

    def close(descriptor: int) -> None:
        closed(descriptor)
        if descriptor in temporary:
            os.unlink(temporary.pop(descriptor))

    def fsync(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        synced(descriptor)

    names: Any = os
    names.open, names.close, names.fsync, names.O_BINARY, names.O_TEMPORARY = open_, close, fsync, BINARY, TEMPORARY


def without(modules: tuple[str, ...]) -> None:
    """Have the package find no module of these names, nor this C library."""
    found, library = builtins.__import__, ctypes.CDLL

    def import_(name: str, globals: Any = None, *given: Any, **options: Any) -> Any:
        importing = str((globals or {}).get("__name__")).partition(".")[0]
        if importing == PACKAGE and name.partition(".")[0] in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, globals, *given, **options)

    def load(name: Any = None, *given: Any, **options: Any) -> Any:
        if name is None and ours():
            raise TypeError("argument of type 'NoneType' is not iterable")
        return library(name, *given, **options)

    changed: Any = builtins, ctypes
    changed[0].__import__, changed[1].CDLL = import_, load


def translate_ends_of_lines() -> None:
    """Have text that is written without ``newline`` get Windows' ends of lines."""
    write: Callable[..., int] = pathlib.Path.write_text

    def write_text(self: Path, data: str, encoding: Any = None, errors: Any = None, newline: Any = None) -> int:
        return write(self, data, encoding, errors, "\r\n" if newline is None else newline)

    changed: Any = pathlib.Path
    changed.write_text = write_text


def pretend(name: str) -> None:
    import accelerate  # noqa: F401  (these look for what their system has when they are imported)
    import psutil
    from torch.utils import cpp_extension  # noqa: F401
    from transformers import AutoTokenizer, T5ForConditionalGeneration  # noqa: F401

    process: Any = psutil.Process
    del process.rlimit
    for gone in LINUX_ONLY:
        delattr(os, gone)
    if name == "win32":
        pretend_windows()
    warnings.filterwarnings("error", category=EncodingWarning, module=PACKAGE)
    from bf16_to_fp16 import system

    changed: Any = system
    changed.sys = types.SimpleNamespace(platform=name)


def pretend_windows() -> None:
    """Take away what POSIX alone has, and refuse what Windows does."""

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EPERM, "A required privilege is not held by the client")

    def unsupported(_: Path) -> bool:
        raise NotImplementedError("Path.is_mount() is unsupported on this system")

    changed: Any = os, shutil, pathlib.Path
    without(MODULES)
    for name in FUNCTIONS:
        delattr(os, name)
    for name in SIGNALS:
        delattr(signal, name)
    changed[0].symlink = changed[0].link = refused
    changed[1]._use_fd_functions = changed[1]._USE_CP_SENDFILE = False
    changed[2].is_mount = unsupported
    refuse_what_windows_cannot_open()
    translate_ends_of_lines()
    refuse_where_in_use("rename", replaces=False)
    for name in ("replace", "unlink", "remove", "rmdir"):
        refuse_where_in_use(name)


if "FAKED_SYSTEM" in os.environ:
    pretend(os.environ["FAKED_SYSTEM"])


def main(commands: list[list[str]]) -> None:
    import importlib
    import pkgutil

    import bf16_to_fp16

    for module in pkgutil.walk_packages(bf16_to_fp16.__path__, f"{PACKAGE}."):
        importlib.import_module(module.name)
    from bf16_to_fp16.__main__ import main as program

    for words in commands:
        sys.argv = [PACKAGE, *words]
        status = program()
        assert status == 0, (words, status)
        print("done:", words[0], flush=True)
