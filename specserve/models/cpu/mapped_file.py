"""Tensors over a file that is mapped into memory, without a copy: plain ones and packed ones.

Knows offsets and layouts, no models.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.claimed_memory import HUGE_PAGE
from specserve.models.memory import use_huge_pages

MAP_FIXED, MAP_FAILED = 0x10, 2**64 - 1  # of mmap(2)


class MappedFile:
    """A file that is mapped read-only, from an address on at which huge pages can begin.

    Every tensor keeps the file mapped and open, with the lock on it if there is one.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Take over `fd`, which is closed with the mapping."""
        self.address, reserved = _map_aligned(fd, num_bytes)
        finalizer = weakref.finalize(self, _unmap, fd, *reserved)
        finalizer.atexit = False  # other threads may still read
        use_huge_pages(self.address, num_bytes)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(tuple(shape), dtype=dtype)
        memory: Any = (ctypes.c_uint8 * num_bytes).from_address(self.address + offset)
        memory.mapped_file = self  # the tensor refers to `memory`
        return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))

    def packed_tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, layout: bytes
    ) -> Tensor:
        """Return a oneDNN tensor; `layout` is what `packed_layout` returned of its original."""
        tensor: Any = _opaque_tensor(self.address + offset, shape, dtype, layout)
        tensor.mapped_file = self
        return tensor  # type: ignore[no-any-return]


def packed_layout(packed: Tensor) -> bytes:
    """Return oneDNN's description of a packed tensor's layout."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy())


def tensor_bytes(tensor: Tensor) -> Any:
    """Return the memory of a contiguous or packed tensor on the CPU, as a buffer."""
    strided = tensor.layout == torch.strided
    num_bytes = tensor.nbytes if strided else torch.ops.mkldnn._nbytes(tensor)
    return (ctypes.c_uint8 * num_bytes).from_address(tensor_address(tensor))


def tensor_address(tensor: Tensor) -> int:
    """Return where the memory of a contiguous or packed tensor on the CPU begins."""
    if tensor.layout == torch.strided:
        return tensor.data_ptr()
    address: int = torch.ops.mkldnn.data_ptr(tensor)
    return address


def can_map() -> bool:
    """Return whether this system and this torch have what mapped tensors take."""
    return sys.platform == "linux" and (not torch._C._has_mkldnn or _torch_shim() is not None)


def _map_aligned(fd: int, num_bytes: int) -> tuple[int, tuple[int, int]]:
    """Map a file, and return the address and the whole range that is to be unmapped."""
    mmap_ = ctypes.CDLL(None, use_errno=True).mmap
    mmap_.restype = ctypes.c_void_p
    mmap_.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    reserved = num_bytes + HUGE_PAGE
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = mmap_(None, reserved, 0, anonymous, -1, 0)
    address = -(-start // HUGE_PAGE) * HUGE_PAGE
    shared = mmap.MAP_SHARED | MAP_FIXED
    if MAP_FAILED in (start, mmap_(address, num_bytes, mmap.PROT_READ, shared, fd, 0)):
        raise OSError(ctypes.get_errno(), "a file of weights cannot be mapped")
    return address, (start, reserved)


def _unmap(fd: int, start: int, num_bytes: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes))
    os.close(fd)


@cache
def _torch_shim() -> Any:
    """Return torch's C interface if it can make oneDNN tensors over foreign memory, else None."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    wanted = ("aoti_torch_create_tensor_from_blob_v2", "aoti_torch_layout__mkldnn")
    return library if all(hasattr(library, name) for name in wanted) else None


def _opaque_tensor(address: int, shape: Sequence[int], dtype: torch.dtype, layout: bytes) -> Tensor:
    shim, handle = _torch_shim(), ctypes.c_void_p()
    dtypes = {
        torch.bfloat16: shim.aoti_torch_dtype_bfloat16,
        torch.float32: shim.aoti_torch_dtype_float32,
    }
    numbers = ctypes.c_int64 * len(shape)
    strides = torch.empty(tuple(shape), device="meta").stride()
    failed = shim.aoti_torch_create_tensor_from_blob_v2(
        ctypes.c_void_p(address),
        ctypes.c_int64(len(shape)),
        numbers(*shape),
        numbers(*strides),
        ctypes.c_int64(0),  # storage offset
        ctypes.c_int32(dtypes[dtype]()),
        ctypes.c_int32(shim.aoti_torch_device_type_cpu()),
        ctypes.c_int32(0),  # device index
        ctypes.byref(handle),
        ctypes.c_int32(shim.aoti_torch_layout__mkldnn()),
        (ctypes.c_uint8 * len(layout)).from_buffer_copy(layout),
        ctypes.c_int64(len(layout)),
    )
    if failed:
        raise RuntimeError("torch cannot make a packed tensor over mapped memory")
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    take: Any = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
    tensor: Any = take(new_capsule(handle, None, None))
    if tensor._use_count() > 1:  # torch 2.13 takes a copy, and the handle keeps the file mapped
        shim.aoti_torch_delete_tensor_object(handle)
    return tensor  # type: ignore[no-any-return]
