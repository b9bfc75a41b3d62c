"""A model's weights in one file, as its network reads them: mapped, they are there at once.

The file has the linear layers' weights in the order in which the network's constructor asks for
them, packed where it packs them, and the state that the library's module keeps, by name. Its first
64 bytes point to an index at the end, with its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from specserve.models.checkpoints.fill import set_tensor
from specserve.models.checkpoints.store import DamagedWeights
from specserve.models.cpu.linear_kernels import LinearKernel
from specserve.models.cpu.mapped_file import MappedFile, packed_layout, tensor_bytes

MAGIC = b"specserve packed"
PREAMBLE = struct.Struct("<16sQQ32s")  # magic, offset and length of the index, its hash
ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place and shape of a tensor in the file."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    layout: str | None = None  # oneDNN's, of a packed tensor, in base64
    stored_shape: tuple[int, ...] | None = None  # of a packed tensor without such a layout

    @classmethod
    def from_json(cls, fields: Any) -> StoredTensor:
        shape, stored = fields["shape"], fields["stored_shape"]
        stored_shape = None if stored is None else tuple(stored)
        return cls(**{**fields, "shape": tuple(shape), "stored_shape": stored_shape})


class PackedWriter:
    """Linear weights that go into a file while a network is built, which is of no other use.

    Layers get tensors on the meta device, so that memory does not hold the weights twice.
    """

    def __init__(self, file: BinaryIO, kernel: LinearKernel) -> None:
        self.kernel = kernel
        self._file, self._end = file, PREAMBLE.size
        self._linears: list[StoredTensor] = []
        self._state: dict[str, StoredTensor] = {}
        self._plain: dict[bytes, StoredTensor] = {}  # by hash: tied tensors are written once

    def pack(self, weight: Tensor, kernel: LinearKernel) -> Tensor:
        packed, shape = kernel.pack(weight.detach()), tuple(weight.shape)
        if packed.layout == torch.strided:
            stored = replace(self._write(packed, shape), stored_shape=tuple(packed.shape))
        else:
            layout = b64encode(packed_layout(packed)).decode()
            stored = replace(self._write(packed, shape), layout=layout)
        self._linears.append(stored)
        return torch.empty(shape, dtype=weight.dtype, device="meta")

    def keep(self, tensor: Tensor) -> Tensor:
        self._linears.append(self._write_once(tensor))
        return torch.empty_like(tensor, device="meta")

    def finish(self, module: nn.Module) -> None:
        """Write what the network's constructor has left in the library's module, and the index."""
        for name, tensor in _state(module).items():
            if not tensor.is_meta:
                self._state[name] = self._write_once(tensor)
        index = json.dumps(
            {
                "linears": [asdict(stored) for stored in self._linears],
                "state": {name: asdict(stored) for name, stored in self._state.items()},
            }
        ).encode()
        self._file.seek(self._end)
        self._file.write(index)
        self._file.seek(0)
        self._file.write(PREAMBLE.pack(MAGIC, self._end, len(index), _hash(index)))
        self._file.flush()

    def _write_once(self, tensor: Tensor) -> StoredTensor:
        tensor = tensor.detach().contiguous()
        shape = tuple(tensor.shape)
        key = _hash(tensor_bytes(tensor)) + repr((shape, tensor.dtype)).encode()
        if key not in self._plain:
            self._plain[key] = self._write(tensor, shape)
        return self._plain[key]

    def _write(self, tensor: Tensor, shape: tuple[int, ...]) -> StoredTensor:
        data = tensor_bytes(tensor)
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._file.seek(offset)
        self._file.write(data)
        self._end = offset + len(data)
        return StoredTensor(offset, len(data), shape, str(tensor.dtype).removeprefix("torch."))


class PackedCheckpoint:
    """A file of packed weights, mapped. A network is built over it once."""

    def __init__(self, fd: int, kernel: LinearKernel) -> None:
        """Take over `fd`. Raises DamagedWeights."""
        self.kernel = kernel
        index = _read_index(fd)
        self._linears: Iterator[StoredTensor] = iter(
            [StoredTensor.from_json(stored) for stored in index["linears"]]
        )
        self._state = {
            name: StoredTensor.from_json(stored) for name, stored in index["state"].items()
        }
        self._mapped = MappedFile(fd, os.fstat(fd).st_size)

    def fill(self, module: nn.Module) -> None:
        """Set the state of a module that has shapes only; the linear layers' weights keep them."""
        tensors: dict[StoredTensor, Tensor] = {}
        for name, stored in self._state.items():
            if stored not in tensors:
                tensors[stored] = self._tensor(stored)
            set_tensor(module, name, tensors[stored])

    def pack(self, weight: Tensor, kernel: LinearKernel) -> Tensor:
        return self._next(weight)

    def keep(self, tensor: Tensor) -> Tensor:
        return self._next(tensor)

    def check_finished(self) -> None:
        assert next(self._linears, None) is None, "the network has fewer layers than the file"

    def _next(self, expected: Tensor) -> Tensor:
        stored = next(self._linears)
        assert stored.shape == expected.shape, "the file has other layers than the network"
        return self._tensor(stored)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, stored.dtype)
        if stored.layout is None:
            return self._mapped.tensor(stored.offset, stored.stored_shape or stored.shape, dtype)
        layout = b64decode(stored.layout)
        return self._mapped.packed_tensor(stored.offset, stored.shape, dtype, layout)


def _state(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, tied ones under each of theirs."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _read_index(fd: int) -> Any:
    preamble = os.pread(fd, PREAMBLE.size, 0)
    if len(preamble) < PREAMBLE.size:
        raise DamagedWeights
    magic, offset, length, digest = PREAMBLE.unpack(preamble)
    if magic != MAGIC or os.fstat(fd).st_size != offset + length:
        raise DamagedWeights
    index = os.pread(fd, length, offset)
    if _hash(index) != digest:
        raise DamagedWeights
    return json.loads(index)


def _hash(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
