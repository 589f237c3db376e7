"""Files of torch.save, looked at before torch reads them: nothing in them is executed.

Archive and pickle are scanned for the names that the pickle refers to; only those that the caller permits may occur,
and nothing may be compressed, so that a small file cannot expand into a large object.
"""

from __future__ import annotations

import io
import pickle  # lint: allow pickle (only with a find_class that imports nothing)
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch

from hetero_megatron.errors import UserError

MAX_PICKLE_BYTES = 64 << 20  # the descriptions of tensors, some 200 bytes each; their values are beside them
# What plain tensors refer to, written by any version of torch ("module name").
TENSOR_NAMES = re.compile(
    r"collections OrderedDict"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|tensor_v3|parameter|parameter_with_state)"
    r"|torch\.nn\.parameter Parameter"
    r"|torch(\.cuda)? [A-Z][A-Za-z0-9]*Storage|torch\.storage (Typed|Untyped)Storage"
    r"|torch (b?float|complex|u?int|bool)[0-9a-z_]*"
)


class Inert:
    """Stands for an object of a class that is not loaded: keeps the state that the pickle gives it, does nothing."""

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        stand_in = object.__new__(cls)
        stand_in.__dict__["args"] = args
        return stand_in

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def load_tensors(file: BinaryIO, stand_ins: re.Pattern[str] | None = None, path: str | None = None) -> Any:
    """The content of a file of torch.save (torch 1.6 or later), on the CPU.

    Args:
        stand_ins: objects of these classes and functions ("module name") become ``Inert``; None: there are none.
        path: of the same file; its tensors are then mapped and not read.

    Raises:
        UserError: it is damaged, compressed, or refers to anything else.
    """
    problem, names = scan_archive(file)
    other_names = [name for name in names if not TENSOR_NAMES.fullmatch(name)]
    foreign = [name for name in other_names if stand_ins is None or not stand_ins.fullmatch(name)]
    if problem or foreign:
        raise UserError(f"not a file of tensors ({problem or refers(foreign[0])})")
    inert = [(type("Inert", (Inert,), {}), name.replace(" ", ".", 1)) for name in other_names]
    file.seek(0)
    others_allow = torch.serialization.get_safe_globals()  # megatron-core's import allows Namespace, among others
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(inert):  # type: ignore[arg-type]
            return torch.load(path or file, map_location="cpu", weights_only=True, mmap=path is not None)
    except Exception as error:  # whatever torch makes of a damaged file; its words are not for our users
        raise UserError("not a file of tensors (it is damaged)") from error
    finally:
        torch.serialization.add_safe_globals(others_allow)


def read_pickle(content: bytes, safe_globals: Mapping[str, Callable[..., Any]], stand_ins: re.Pattern[str]) -> Any:
    """Unpickle plain data: every class or function that the pickle refers to is one of ``safe_globals`` ("module
    name"), or ``Inert`` if ``stand_ins`` permits it. Nothing is imported.

    Raises:
        UserError: it is damaged, or refers to anything else.
    """

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            full = f"{module} {name}"
            if full in safe_globals:
                return safe_globals[full]
            if stand_ins.fullmatch(full):
                return Inert
            raise UserError(f"not read: {refers(full)}")

    try:
        return Reader(io.BytesIO(content)).load()
    except UserError:
        raise
    except Exception as error:  # pickle raises what the damage leads to
        raise UserError("it is damaged") from error


def refers(name: str) -> str:
    """What is said of a name that is not permitted."""
    return f"it holds {ascii(name.replace(' ', '.'))[1:-1][:80]}, and only plain tensors are read"


def scan_archive(file: BinaryIO) -> tuple[str, list[str]]:
    """(what is wrong with a torch zip file, empty if nothing; the names that its pickle refers to, in order)."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            pickles = [e for e in entries if e.filename.endswith("/data.pkl")]
            if len({e.filename for e in entries}) < len(entries) or len(pickles) != 1:
                return "its archive is damaged", []
            if any(e.compress_type != zipfile.ZIP_STORED or e.flag_bits & 1 for e in entries):
                return "its archive is compressed, which torch never writes", []
            if pickles[0].file_size > MAX_PICKLE_BYTES:
                return "it describes too many tensors", []
            with archive.open(pickles[0]) as stream:
                return scan_pickles(stream, 1)
    except Exception:  # zipfile raises what the damage leads to: BadZipFile, struct.error, EOFError, ValueError, ...
        return "its archive is damaged", []


def scan_pickles(stream: Any, count: int) -> tuple[str, list[str]]:
    """The same of ``count`` consecutive pickles."""
    names: dict[str, None] = {}
    try:
        for _ in range(count):
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL"):
                    names[str(argument or "a computed name")] = None
    except Exception:  # pickletools, likewise
        return "it is damaged", []
    return "", list(names)
