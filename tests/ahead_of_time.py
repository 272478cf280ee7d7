"""Compile what the heuristics can pick for an architecture, with no GPU: python tests/ahead_of_time.py 90 [kernel].

A process of its own, since kernels that were made for Triton's interpreter cannot be compiled.  Prints for each pick a
line of JSON: what it is, its shared memory, and the assembler's registers and stack.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paged_kv.triton_device import Limits, next_pow2

# Multiprocessors, and the shared memory that one program can have (CUDA programming guide, compute capabilities).
LIMITS = {80: Limits(108, 166912), 86: Limits(84, 101376), 89: Limits(142, 101376), 90: Limits(132, 232448)}
TYPES = {2: "bf16", 4: "fp32"}


def compile_kernel(
    kernel: Any, arch: int, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int = 3
) -> dict[str, Any]:
    """Compile one kernel; parameters are i32 unless in `types` or `constants`, strides and pointers multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    strides = re.compile(r"(k|v|q|o)_(\w+_)?(block|token|head|stride|row)$|words$")
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or strides.match(name)]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"shared": made.metadata.shared, **resources(made.asm["cubin"])}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack, from the cuobjdump that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    return {"registers": int(found[1]), "stack": int(found[2])} if found else {}


def decode(arch: int) -> Iterator[dict[str, Any]]:
    """Every pick of chapter 11; without ALL_PICKS=1, one for each need of shared memory (heads a tile change none)."""
    from paged_kv.decode_kernels import decode_kernel
    from paged_kv.decode_plan import every_pick
    from paged_kv.kernels import decode_constants

    seen = set()
    for pick in every_pick(LIMITS[arch]):
        columns = max(16, next_pow2(pick.group * pick.tiles.heads))
        need = (pick.head_size, pick.itemsize, pick.tiles.rows, pick.tiles.stages, columns)
        if need in seen and not os.environ.get("ALL_PICKS"):
            continue
        seen.add(need)
        pointer = "*" + TYPES[pick.itemsize]
        types = dict.fromkeys(("query", "keys", "values", "output"), pointer) | dict.fromkeys(
            ("table", "seq_lens", "cum", "record", "arrived"), "*i32"
        )
        types |= dict.fromkeys(("lse", "part", "part_lse"), "*fp32") | {"scale": "fp32", "cap": "fp32"}
        constants = {"rows": None, "sinks": None} | decode_constants(pick.tiles, pick.group, pick.head_size, 16)
        made = compile_kernel(decode_kernel, arch, types, constants, pick.tiles.warps)
        what = f"{pick.tiles}, {pick.group} heads a group, head size {pick.head_size}, {TYPES[pick.itemsize]}"
        yield {"kernel": "decode", "pick": what, **made}


def prefill(arch: int) -> Iterator[dict[str, Any]]:
    """Every pick of chapter 12."""
    from paged_kv.kernels_prefill import prefill_constants, prefill_kernel
    from paged_kv.prefill_plan import every_prefill_pick

    for pick in every_prefill_pick(LIMITS[arch]):
        pointer = "*" + TYPES[pick.itemsize]
        types = dict.fromkeys(("query", "keys", "values", "output"), pointer) | dict.fromkeys(
            ("table", "record"), "*i32"
        )
        types |= {"lse": "*fp32", "scale": "fp32", "cap": "fp32"}
        constants = {"sinks": None} | prefill_constants(pick.tiles, pick.group, pick.head_size, 16)
        made = compile_kernel(prefill_kernel, arch, types, constants, pick.tiles.warps, pick.tiles.stages)
        what = f"{pick.tiles}, {pick.group} heads a group, head size {pick.head_size}, {TYPES[pick.itemsize]}"
        yield {"kernel": "prefill", "pick": what, **made}


if __name__ == "__main__":
    which = {"decode": decode, "prefill": prefill}
    for name in sys.argv[2:] or ["decode"]:
        for row in which[name](int(sys.argv[1])):
            print(json.dumps(row | {"limit": LIMITS[int(sys.argv[1])].shared_memory}), flush=True)
