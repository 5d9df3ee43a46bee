"""Compiles the fused loss for an H200 without one: what the interpreter forgives, the compiler does not.

Run as a script, in a process of its own where `TRITON_INTERPRET` is not set.
"""

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchace.kernels.ace_blocks import _in_blocks
from torchace.kernels.ace_pieces import _counts, _multiplied
from torchace.kernels.ace_whole import _whole

POINTERS = {
    "values": "*fp32",
    "weight": "*fp32",
    "mean_weight": "*fp32",
    "alpha": "*fp32",
    "mixture": "*fp32",
    "scale": "*fp32",
    "counts": "*fp32",
    "by": "*fp32",
    "statistics": "*fp32",
    "smoothing": "fp32",
}
PLAIN = {
    "WRITE": True,
    "PROBABILITIES": False,
    "WEIGHTED": False,
    "UNIFORM": True,
    "MIXTURE": False,
    "SCALE": False,
    "COUNT": 1,
    "COUNTS": 8,
    "BY": False,
    "ON_DEVICE": False,
    "ACC": tl.float32,
    "SMOOTHED": False,
    "FAST": True,
    "STAGES": 1,
    "VECTOR": 4,
    "logits_c": 1,
    "gradient_c": 1,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"PROBABILITIES": True, "WEIGHTED": True, "SMOOTHED": True, "COUNT": 3},
    {"WEIGHTED": True, "UNIFORM": False, "SCALE": True, "COUNT": 0, "ON_DEVICE": True},
    {"MIXTURE": True, "UNIFORM": False, "BY": True, "COUNT": 2},
    {"COUNT": 4},
    {"WRITE": False},
]


def compiled(kernel: Any, dtype: str, warps: int, **constants: Any) -> None:
    names = kernel.arg_names
    constants = {name: value for name, value in (PLAIN | constants).items() if name in names}
    types = POINTERS | {
        "logits": f"*{dtype}",
        "gradient": f"*{dtype}",
        "target": "*fp32" if constants.get("PROBABILITIES") else "*i64",
        "diversity": "*fp32" if constants.get("ON_DEVICE") else "fp32",
    }
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(
        kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()}, attrs=aligned
    )
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert result.asm["cubin"]
    print(kernel.fn.__name__, dtype, warps, constants)


def main() -> None:
    for options in OPTIONS:
        sizes = {"MEMBERS": 10, "CLASSES": 100, "MOST": 8, "REST": 2, "SOME_CLASSES": 128}
        compiled(_whole, "bf16", 4, **sizes, SOME=2, **({"STAGES": 3} | options))
        for stage, span, spans in ((0, 128, 1), (1, 128, 3), (2, 128, 3)):
            blocks = {"STAGE": stage, "SPAN": span, "SPANS": spans, "SOME_SPANS": 4 if spans > 1 else 1}
            compiled(_in_blocks, "bf16", 4, **sizes, **blocks, **options)
    for dtype in ("fp32", "fp16"):
        compiled(_whole, dtype, 4, MEMBERS=5, CLASSES=10, MOST=4, REST=1, SOME_CLASSES=16, SOME=16)
    for weighted in (True, False):
        compiled(_counts, "bf16", 4, WEIGHTED=weighted, BLOCK=1024)
        compiled(_counts, "bf16", 4, WEIGHTED=weighted, BLOCK=1024, parts=1)
    compiled(_multiplied, "bf16", 4, BLOCK=4096)


if __name__ == "__main__":
    main()
