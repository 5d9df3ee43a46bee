"""Compiles the fused loss for an H200 without one: what the interpreter forgives, the compiler does not.

Run as a script, in a process of its own where `TRITON_INTERPRET` is not set.
"""

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchace.kernels.ace_once_gpu import _read_once
from torchace.kernels.ace_terms_gpu import _count_samples, _scale
from torchace.kernels.ace_twice_gpu import _read_twice

POINTERS = {
    "values": "*fp32",
    "weight": "*fp32",
    "mean_weight": "*fp32",
    "alpha": "*fp32",
    "mixture": "*fp32",
    "scale": "*fp32",
    "counts": "*fp32",
    "upstream": "*fp32",
    "statistics": "*fp32",
    "scores": "*fp32",
    "smoothing": "fp32",
}
PLAIN = {
    "WITH_GRADIENT": True,
    "PROBABILITIES": False,
    "WEIGHTED": False,
    "UNIFORM": True,
    "MIXTURE": False,
    "SCALE": False,
    "COUNT": 1,
    "COUNTS": 8,
    "UPSTREAM": False,
    "DIVERSITY_ON_DEVICE": False,
    "ACC": tl.float32,
    "SMOOTHED": False,
    "FAST": True,
    "STAGES": 1,
    "RUNS": False,
    "PER_MEMBER": False,
    "VECTOR": 4,
    "logits_c": 1,
    "gradient_c": 1,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"PROBABILITIES": True, "WEIGHTED": True, "SMOOTHED": True, "COUNT": 3},
    {"WEIGHTED": True, "UNIFORM": False, "SCALE": True, "COUNT": 0, "DIVERSITY_ON_DEVICE": True},
    {"MIXTURE": True, "UNIFORM": False, "UPSTREAM": True, "COUNT": 2},
    {"COUNT": 4},
    {"WITH_GRADIENT": False},
]


def compile_one(kernel: Any, dtype: str, warps: int, **constants: Any) -> None:
    names = kernel.arg_names
    constants = {name: value for name, value in (PLAIN | constants).items() if name in names}
    types = POINTERS | {
        "logits": f"*{dtype}",
        "gradient": f"*{dtype}",
        "target": "*fp32" if constants.get("PROBABILITIES") else "*i64",
        "diversity": "*fp32" if constants.get("DIVERSITY_ON_DEVICE") else "fp32",
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
        sizes = {"MEMBERS": 10, "CLASSES": 100, "BLOCK_K": 8, "REST_K": 2, "BLOCK_C": 128}
        compile_one(_read_once, "bf16", 4, **sizes, BLOCK_N=2, **({"STAGES": 3} | options))
        for stage, span, spans in ((0, 128, 1), (1, 128, 3), (2, 128, 3)):
            blocks = {"STAGE": stage, "SPAN": span, "SPANS": spans, "BLOCK_SPANS": 4 if spans > 1 else 1}
            compile_one(_read_twice, "bf16", 4, **sizes, **blocks, **options)
    for dtype in ("fp32", "fp16"):
        runs = {"RUNS": True, "PER_MEMBER": True, "SCALE": True, "COUNT": 0, "DIVERSITY_ON_DEVICE": True}
        compile_one(_read_once, dtype, 16, MEMBERS=5, CLASSES=10, BLOCK_K=4, REST_K=1, BLOCK_C=16, BLOCK_N=128, **runs)
        own = runs | {"MIXTURE": True, "UNIFORM": False}
        compile_one(_read_once, dtype, 16, MEMBERS=1, CLASSES=10, BLOCK_K=1, REST_K=0, BLOCK_C=16, BLOCK_N=64, **own)
        compile_one(_read_once, dtype, 4, MEMBERS=5, CLASSES=10, BLOCK_K=4, REST_K=1, BLOCK_C=16, BLOCK_N=16)
    for weighted in (True, False):
        compile_one(_count_samples, "bf16", 4, WEIGHTED=weighted, BLOCK=1024)
        compile_one(_count_samples, "bf16", 4, WEIGHTED=weighted, BLOCK=1024, parts=1)
    compile_one(_scale, "bf16", 4, BLOCK=4096)


if __name__ == "__main__":
    main()
