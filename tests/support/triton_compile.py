"""Compile a kernel's Triton configurations for every chip, without a GPU: `python triton_compile.py KERNEL,... [triton | gluon | triton_fixed]`.

Prints one JSON object per line: kernel, name, capability, shared (bytes), registers (per thread), stack (bytes per
thread, spills included), hot (for each innermost loop over products: instructions, and those that spill and reload),
register_a (async wgmma reads A from registers), serialised (what ptxas says of asynchronous products that it makes wait),
one_address and one_buffer (the compiler's faults of those names). Runs in a process of its own because a process whose
Triton interprets cannot compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from importlib import import_module
from itertools import product

from draftwood.kernels.compile_case import CAPABILITIES
from draftwood.kernels.registry import IMPLEMENTATIONS


def report(kernels, impl="triton"):
    for kernel, capability in product(kernels.split(","), CAPABILITIES):
        module = import_module(f"draftwood.kernels.{kernel}.{IMPLEMENTATIONS[impl]}")
        for case in module.compile_cases(capability):
            facts = compile_facts(case, capability)
            print(json.dumps({"kernel": kernel, "name": case.name, "capability": capability, **facts}))


def compile_facts(case, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = case.kernel.arg_names
    if unmatched := set(names) ^ (set(case.arguments) | set(case.constexprs)):
        raise ValueError(f"compile case `{case.name}`: missing or unknown: {', '.join(sorted(unmatched))}")
    source = (GluonASTSource if case.kernel.is_gluon() else ASTSource)(
        case.kernel,
        signature={n: argument_type(case.arguments.get(n, 1)) for n in names},
        constexprs={
            (i,): case.constexprs.get(n, 1) for i, n in enumerate(names) if case.arguments.get(n, 1) == 1
        },
        attrs={
            path: [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            for path, argument in leaves((i,), case.arguments.get(n, 1))
            if known_multiple(argument)
        },
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "shared": compiled.metadata.shared,
        **resource_usage(compiled.asm["cubin"]),
        "hot": hot_loops(compiled.asm["cubin"]),
        "serialised": serialised(compiled.asm["ptx"], capability),
        "register_a": bool(re.search(r"warp_group_dot .*isAsync = true.*: tensor<", compiled.asm["ttgir"])),
        "one_address": one_address(compiled.asm["ptx"]),
        "one_buffer": one_buffer(compiled.asm["ttgir"]),
    }


def leaves(path, argument):
    """An argument, or those of a tuple, and where they are."""
    return (
        [((*path, i), a) for i, a in enumerate(argument)]
        if isinstance(argument, tuple)
        else [(path, argument)]
    )


def argument_type(argument):
    """A type, those of a tuple, or an example of an integer; 1 is what Triton takes as a constant."""
    if isinstance(argument, str | tuple):
        return argument
    return "constexpr" if argument == 1 else "i32" if -(2**31) <= argument < 2**31 else "i64"


def known_multiple(argument):
    return argument.startswith("*") if isinstance(argument, str) else argument % 16 == 0


def resource_usage(cubin):
    import triton

    text = inspect(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin)
    used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return {"registers": int(used["REG"]), "stack": int(used["STACK"]) + int(used["LOCAL"])}


def serialised(ptx, capability):
    if "wgmma" not in ptx:
        return []
    import triton

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            triton.knobs.nvidia.ptxas.path,
            f"--gpu-name=sm_{capability}a",
            file.name,
            "-o",
            "/dev/null",
        ]
        log = subprocess.run(command, check=True, capture_output=True, text=True)
    return re.findall(r"\(C75\d\d\).*", log.stderr)


def one_address(ptx):
    """Whether operands of wgmma at one address differ in swizzle or strides: ptxas 12.8 then gets descriptors wrong."""
    kinds = defaultdict(set)
    for address, rest in re.findall(r"(?:or|add)\.[bs]64\s+%rd\d+, (%rd\d+), (-?\d{16,});", ptx):
        kinds[address].add(int(rest) >> 32)
    return any(len(k) > 1 for k in kinds.values())


def one_buffer(ttgir):
    """Operands of wgmma that the pipeliner gave a single buffer: the next copy may be under way when they are read."""
    buffers = set(re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x", ttgir))
    views = re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", ttgir)
    read = re.findall(r"%\w+", " ".join(re.findall(r"warp_group_dot ([^:{]*)", ttgir)))
    return sorted((buffers | {view for view, buffer in views if buffer in buffers}) & set(read))


def hot_loops(cubin):
    """Innermost loops over matrix instructions or many fused multiply-adds; any innermost loops where there are none."""
    import triton

    code, labels, loops = [], {}, []
    for line in inspect(triton.knobs.nvidia.nvdisasm.path, "-c", cubin).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?PT?\d*\s+)?(\w+)(.*);", line):
            code.append(instruction[1])
            if instruction[1] == "BRA" and (target := re.search(r"\.L_x_\d+", instruction[2])):
                start = labels.get(target[0], len(code))
                loops.append((start, len(code), Counter(code[start:])))
    last_exit = len(code) - code[::-1].index("EXIT")  # later branches return from code moved out of line
    loops = [loop for loop in loops if loop[2] and loop[1] < last_exit]
    loops = [loop for loop in loops if multiplies(loop[2])] or loops
    return [
        {"instructions": end - start, "spills": counts["STL"], "reloads": counts["LDL"]}
        for start, end, counts in loops
        if not any(start <= s and e < end for s, e, _ in loops)
    ]


def multiplies(counts):
    return any(counts[m] for m in ("HMMA", "HGMMA", "UTCHMMA")) or counts["FFMA"] > 255


def inspect(tool, option, cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    report(*sys.argv[1:])
