# Exported from book/appendices/A5_check_your_own.py by tools/export.py; edit the chapter, not this file.
"""Somebody else's module: import it, see what it lacks, run it without being taken down."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from paged_kv.check_rules import Broken

NEEDED = {  # of each module: what is called, and with which arguments
    "block_pool": {
        "OutOfBlocks": "needed free", "BlockPool": "num_blocks", "BlockPool.take": "count",
        "BlockPool.claim": "ids", "BlockPool.release": "ids", "BlockPool.free_ids": "",
        "BlockPool.check": "",
    },
    "block_manager": {
        "BlockManager": "num_blocks block_size max_seqs max_seq_len",
        "BlockManager.add": "num_tokens", "BlockManager.append": "rows new_tokens",
        "BlockManager.finish": "row", "BlockManager.check": "",
    },
    "copy_on_write": {
        "fork": "manager row", "make_writable": "manager rows new_tokens",
        "rewire": "manager rows parents", "rewind": "manager rows count",
    },
    "prefix_cache": {
        "PrefixCache": "pool block_size", "PrefixCache.root": "parts",
        "admit_cached": "manager cache tokens root", "give_back": "manager row",
        "publish_full": "manager cache row tokens published root",
    },
    "kv_store": {
        "KVStore": "spec num_blocks block_size", "KVStore.copy_blocks": "pairs",
        "KVStore.write": "layer k v slot_mapping",
        "KVStore.gather": "layer block_table_row seq_len",
    },
    "attention": {
        "paged_attention_numpy": "query keys values block_table_row seq_len",
    },
}  # fmt: skip


def find_path(module: object, path: str) -> Any:
    """`BlockPool.take` of a module, None where it does not exist."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def missing_names(module: ModuleType, kind: str) -> list[str]:
    """In words, which names of NEEDED the module lacks or cannot be called as the book does."""
    said = []
    for path, text in NEEDED[kind].items():
        found, args = find_path(module, path), text.split()
        called = f"{path}({', '.join(args)})"
        if found is None:
            said.append(f"{called} is missing")
            continue
        owner = find_path(module, path.rpartition(".")[0]) if "." in path else None
        static = owner is None or isinstance(
            inspect.getattr_static(owner, path.rpartition(".")[2]), staticmethod
        )
        try:
            inspect.signature(found).bind(*([] if static else ["self"]), *args)
        except TypeError as error:
            said.append(f"{called} cannot be called so: {error}")
        except ValueError:
            continue  # a built-in without a signature: calling it will tell
    return said


def name_of(module: ModuleType, name: str) -> Any:
    """A name of the reader's module or of its neighbour `block_tables`, or else the book's own."""
    found, package = getattr(module, name, None), getattr(module, "__package__", None)
    if found is None and package:
        try:
            found = getattr(importlib.import_module(f"{package}.block_tables"), name, None)
        except ImportError:
            pass
    return getattr(importlib.import_module("paged_kv"), name) if found is None else found


def place_of(error: BaseException) -> str:
    """File, line and function where an exception arose, the reader's own code preferred."""
    here = Path(importlib.import_module("paged_kv").__path__[0])
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if Path(frame.filename).parent != here]
    theirs = [f for f in outside if f.filename[0] != "<" and f.name != "ring"]
    frame = [*frames, *theirs][-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"


def call_theirs(function: Callable[..., Any], *args: Any) -> tuple[str, Any]:
    """Run the reader's code.  Returns ("", result), or (name of the refusal, the exception).

    Raises: Broken for every other exception.
    """
    try:
        return "", function(*args)
    except Broken:
        raise
    except NotImplementedError as error:
        raise Broken("UNWRITTEN", "a result", error) from error
    except (Exception, SystemExit) as error:
        name = type(error).__name__
        if isinstance(error, ValueError) or name == "OutOfBlocks":
            return ("OutOfBlocks" if name == "OutOfBlocks" else "ValueError"), error
        raise Broken("CRASH", "a result", f"{name}: {error} ({place_of(error)})") from error


def field_of(owner: object, name: str) -> Any:
    """A field that the book's classes have; Broken where the reader's has not."""
    outcome, value = call_theirs(getattr, owner, name, None)
    if outcome or value is None:
        raise Broken("NAMES", f"{type(owner).__name__} has the field {name}", "it has none")
    return value


class TooLong(BaseException):
    """The time is up.  Not an Exception, so that the reader's own code does not catch it."""


def ring(*_: object) -> None:
    """The alarm."""
    raise TooLong


def give_up() -> None:
    """End the process: somebody's code catches everything, the alarm too."""
    print("TIME: Every operation ends.  Yours does not, and a bare `except:` caught the alarm.")
    sys.stdout.flush()
    os._exit(1)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooLong in the code inside; end the process 5 s later if that is of no use.

    Where there is no alarm signal, as on Windows, only the second is done.
    """
    last = threading.Timer(seconds + 5, give_up)
    last.daemon = True
    last.start()
    alarm = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    before = signal.signal(signal.SIGALRM, ring) if alarm else None
    try:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    finally:
        if alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        last.cancel()


def load_theirs(name: str) -> ModuleType:
    """Import the reader's module, the current folder first.

    Raises: ValueError if there is no such file; Broken if importing it fails.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        with time_limit(60):
            return importlib.import_module(name)
    except TooLong:
        raise Broken("TIME", "a module that can be imported", "importing it never ends") from None
    except (Exception, SystemExit) as error:
        lost = error.name if isinstance(error, ModuleNotFoundError) else None
        if lost and f"{name}.".startswith(f"{lost}."):
            file = f"{name.replace('.', '/')}.py"
            raise ValueError(f"--module {name}: there is no {file} in {Path.cwd()}") from None
        where = "" if isinstance(error, SyntaxError) else f" ({place_of(error)})"
        said = f"{type(error).__name__}: {error}{where}"
        raise Broken("CRASH", "a module that can be imported", said) from error
