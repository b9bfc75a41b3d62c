"""A cap on oneDNN where the processor has AMX, and how threads wait for one another.

Imports no torch.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
CAP = "AVX512_CORE_BF16"
CAP_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""What oneDNN reads at its first product; the second counts where the first is not set."""
WITHOUT_AMX = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
    CAP,
    "AVX512_CORE_FP16",
    "AVX10_1_512",
)

SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPINS = "4000"
"""Looks of OpenMP before a thread sleeps, some 0.2 milliseconds: as long as torch takes in between.

OpenMP's own number is 300,000 where there are cores enough. A thread that spins so long holds the
core that the thread it waits for needs, where another session or container has the other core.
Compiled layers wait in a way of their own.
"""


@cache
def processor_flags(file: Path = CPU_INFO) -> frozenset[str]:
    """Return the flags of the first processor, if the system lists them."""
    if not file.is_file():
        return frozenset()
    with file.open(encoding="utf-8", errors="replace") as lines:
        found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())


def has_amx() -> bool:
    return not processor_flags().isdisjoint(("amx_tile", "amx_bf16"))


def limit_of_onednn() -> tuple[str, str] | None:
    """Return the variable that limits the instructions of oneDNN, and its value."""
    return next(((name, os.environ[name]) for name in CAP_VARIABLES if os.environ.get(name)), None)


def cap_onednn() -> None:
    """Keep oneDNN from AMX, unless the user has set how far it may go.

    Its AMX products change the bits of a row with the number of rows beside it, from an inner
    dimension of 512 on. Call this before the first product: oneDNN never reads the variable again.
    """
    if has_amx() and limit_of_onednn() is None:
        os.environ[CAP_VARIABLES[0]] = CAP


def limit_spinning() -> None:
    """Let threads that wait for one another sleep soon, unless the user has set how they wait.

    Call this before torch is imported: OpenMP never reads the variable again.
    """
    if not any(os.environ.get(name) for name in SPIN_VARIABLES):
        os.environ[SPIN_VARIABLES[0]] = SPINS


def uses_amx() -> bool:
    """Return whether oneDNN may use AMX here, which takes a user who has lifted the cap."""
    limit = limit_of_onednn()
    return has_amx() and (limit is None or limit[1].upper() not in WITHOUT_AMX)


def foreign_environment() -> dict[str, str]:
    """Return the environment for other programs, which need neither the cap nor our way to wait."""
    own = ((CAP_VARIABLES[0], CAP), (SPIN_VARIABLES[0], SPINS))
    return {name: value for name, value in os.environ.items() if (name, value) not in own}
