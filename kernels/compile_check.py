"""Compile every kernel and tabled configuration for sm_90 without a GPU, and hold the machine code to limits.

    python kernels/compile_check.py                  # all cases, installed Triton and 3.6.0; rewrites the table in README.md
    python kernels/compile_check.py --short          # one case of each kernel, installed Triton only (the test suite)
    python kernels/compile_check.py --only attention --triton installed

A module of nb_kernels takes part by a function `compile_cases()` that yields tuples
(name, kernel, types, constants, options, matrix):

    name        shown in the table; unique
    kernel      the @triton.jit function
    types       {argument: "*bf16" | "fp32" | "i64" | "tensordesc<bf16[128,64]>" | "i32:16" ...}; may name arguments that the
                kernel lacks; ":16" marks an integer that is a multiple of 16 in practice (a stride); an argument named neither
                here nor in constants is "i32"
    constants   {constexpr argument: value}; may name arguments that the kernel lacks
    options     {"num_warps": ..., "num_stages": ...}; Triton's defaults for those left out
    matrix      True: the machine code must multiply by wgmma only and load through TMA; "wgmma": wgmma only

Each case is compiled aligned (pointers and integers marked divisible by 16, as the JIT does at run time) and, outside the short
form, unaligned. Both must compile, fit 227 KiB of shared memory and keep registers that a wgmma multiplies until it has read
them. Aligned ones must do without register spills and local-memory traffic (LDL, STL), unless the name holds "(may spill)",
and show the instructions that `matrix` asks for; of unaligned ones all that is reported only. The short form takes the first
case of each kernel.
Compiles run in worker processes, so a compiler crash costs one case and is reported.
The other Triton is fetched as a wheel (pip download) into .cache/ and unpacked beside; it is never installed.
"""
import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache"
SHARED_MEMORY = 227 * 1024
OTHER_TRITON = "3.6.0"
BEGIN, END = "<!-- compile_check: begin -->", "<!-- compile_check: end -->"


class Case(NamedTuple):
    name: str
    kernel: object
    types: dict
    constants: dict
    options: dict
    matrix: bool | str


def cases():
    """{name: Case} of all modules of nb_kernels."""
    import nb_kernels

    found = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(nb_kernels.__path__)):
        imported = importlib.import_module(f"nb_kernels.{module}")
        for case in getattr(imported, "compile_cases", list)():
            case = Case(*case)
            if case.name in found:
                raise ValueError(f"two compile cases are named {case.name!r}: names must be unique")
            found[case.name] = case
    return found


def written(text):
    """Numbers of the registers that an instruction writes."""
    name, *operands = re.split(r",? +", text)
    register = re.match(r"R(\d+)", " ".join(operands[:2]).removeprefix("PT "))  # a shuffle's predicate stands before it
    if register is None:
        return range(0)
    if name.startswith("HGMMA"):
        count = int(re.search(r"64x(\d+)x", name)[1]) // 2
    elif ".128" in name or name.endswith("88.4"):
        count = 4
    else:
        count = 1 + (".64" in name or ".WIDE" in name or name.endswith("88.2") or name == "CS2R")
    return range(int(register[1]), int(register[1]) + count)


def overwritten(sass):
    """How many wgmma have a register operand that some path writes before the wait after which it has been read.

    ptxas before 13.3 may compile that, out of right PTX, and products are wrong (triton-lang/triton issue 9433, pull 11781).
    """
    code = [(int(at, 16), bool(guard), text) for at, guard, text in re.findall(r"/\*(\w{4,})\*/ +(@\S+ )? *(\S.*?) +;", sass)]
    place, found = {at: i for i, (at, _, _) in enumerate(code)}, 0
    for start, (_, _, text) in enumerate(code):
        operand = re.match(r"HGMMA\S* R\d+, R(\d+), gdesc", text)
        if operand is None:
            continue
        registers = range(int(operand[1]), int(operand[1]) + 4)
        todo, seen, bad = [(start + 1, int("gsb0" in text))], set(), False  # (instruction, groups closed since)
        while todo and not bad:
            i, groups = todo.pop()
            while i < len(code) and (i, groups) not in seen:
                seen.add((i, groups))
                _, guarded, text = code[i]
                bad = bad or any(r in registers for r in written(text))
                groups += text.startswith("HGMMA") and "gsb0" in text
                wait = re.match(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\d+)", text)
                target = re.match(r"BRA.* 0x(\w+)", text)
                if target and int(target[1], 16) in place:
                    todo.append((place[int(target[1], 16)], groups))
                if bad or (wait and groups > int(wait[1], 16)) or (text.startswith(("BRA", "EXIT")) and not guarded):
                    break
                i += 1
        found += bad
    return found


def compile_case(case, aligned):
    """Compile one case for sm_90 and read registers, spills, shared memory and instructions off the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(case.kernel.arg_names)
    constants = {n: v for n, v in case.constants.items() if n in names}
    types = {n: "constexpr" if n in constants else case.types.get(n, "i32") for n in names}
    marked = [n for n in names if types[n].startswith("*") or types[n].endswith(":16")] if aligned else []
    source = ASTSource(
        fn=case.kernel,
        signature={n: t.removesuffix(":16") for n, t in types.items()},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in marked},
    )
    begin = time.perf_counter()
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(case.options))
    seconds = time.perf_counter() - begin
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "k.cubin"), Path(folder, "k.ptx")
        cubin.write_bytes(binary.asm["cubin"])
        ptx.write_text(binary.asm["ptx"])
        command = [tools / "ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", Path(folder, "o.cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        sass = subprocess.run([tools / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True).stdout
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups())

    def count(pattern):
        return len(re.findall(rf"\b{pattern}\b", sass))

    return {
        "registers": int(re.search(r"Used (\d+) registers", log).group(1)),
        "spills": max(stores, loads),
        "local": count("LDL") + count("STL"),
        "shared": binary.metadata.shared,
        "wgmma": count("HGMMA"),
        "mma": count("HMMA"),
        "tma": count("UTMALDG"),
        "overwritten": overwritten(sass),
        "serialised": len(re.findall(r"C75\d\d", log)),  # ptxas waits for each wgmma: correct but slow
        "seconds": round(seconds, 1),
    }


def faults(case, result, aligned=True):
    """What a result breaks, in words; empty when all is well."""
    if "error" in result:
        return [result["error"]]
    found = []
    if aligned and (result["spills"] or result["local"]) and "(may spill)" not in case.name:
        found.append(f"{result['spills']} bytes of spills, {result['local']} local-memory instructions")
    if result["shared"] > SHARED_MEMORY:
        found.append(f"{result['shared']} bytes of shared memory, {SHARED_MEMORY} exist")
    if result["overwritten"]:
        found.append(f"registers of {result['overwritten']} wgmma are overwritten before they are read: try another ptxas")
    if aligned and case.matrix and (result["mma"] or not result["wgmma"]):
        found.append(f"{result['wgmma']} wgmma and {result['mma']} mma.sync: tensor cores must run wgmma only")
    if aligned and case.matrix is True and not result["tma"]:
        found.append("no TMA loads")
    return found


def work():
    """Worker: a JSON list of [name, aligned] on stdin, one JSON line [name, aligned, result] per case on stdout."""
    known = cases()
    for name, aligned in json.load(sys.stdin):
        try:
            result = compile_case(known[name], aligned)
        except Exception as error:  # any failure to compile is this case's result
            result = {"error": f"{type(error).__name__}: {str(error).strip()[-300:]}"}
        print("\n" + json.dumps([name, aligned, result]), flush=True)


def run(version, todo, jobs):
    """{(name, aligned): result} from worker processes on one Triton version."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = [str(HERE)] if version == "installed" else [str(fetch(version)), str(HERE)]
    env |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(CACHE / f"compiled-{version}")}

    def one(share):
        results = {}
        while share:
            command = [sys.executable, __file__, "--worker"]
            done = subprocess.run(command, input=json.dumps(share), capture_output=True, text=True, env=env)
            for line in done.stdout.splitlines():
                if line.startswith('["'):
                    name, aligned, result = json.loads(line)
                    results[name, aligned] = result
            rest = [item for item in share if tuple(item) not in results]
            if rest:  # the worker died at the first of these
                results[tuple(rest.pop(0))] = {"error": f"compiler exited with {done.returncode}: {done.stderr.strip()[-300:]}"}
            share = rest
        return results

    merged = {}
    with ThreadPoolExecutor(jobs) as pool:
        for results in pool.map(one, [todo[i::jobs] for i in range(jobs) if todo[i::jobs]]):
            merged |= results
    return merged


def fetch(version):
    """Folder with that Triton unpacked, from the package index on first use."""
    folder = CACHE / f"triton-{version}"
    if not (folder / "triton").is_dir():
        with tempfile.TemporaryDirectory() as download:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", f"triton=={version}"]
            subprocess.run([*command, "-d", download], check=True)
            with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as wheel:
                wheel.extractall(folder)
        for tool in (folder / "triton/backends/nvidia/bin").iterdir():
            tool.chmod(0o755)  # a zip does not carry the executable bit
    return folder


def label(version):
    if version != "installed":
        return version
    import triton

    return triton.__version__


def table(known, results):
    """Markdown: one row per case, aligned; per Triton version registers, spills, shared memory, wgmma, TMA."""
    versions = list(results)
    head = "| kernel | warps, stages | " + " | ".join(f"Triton {label(v)}" for v in versions) + " |"
    lines = [head, "|" + " --- |" * (len(versions) + 2)]
    for name, case in known.items():
        cells = []
        for version in versions:
            r = results[version].get((name, True))
            if r is None or "error" in r:
                cells.append("not compiled" if r is None else "fails")
                continue
            parts = [f"{r['registers']} reg", f"{r['spills']} B spilled" if r["spills"] else "no spills"]
            parts.append(f"{r['shared'] / 1024:.0f} KiB")
            parts += [f"{r[key]} {key}" for key in ("wgmma", "mma", "tma") if r[key]]
            parts += ["wgmma serialised"] if r["serialised"] else []
            cells.append(", ".join(parts))
        launch = ", ".join(str(case.options.get(key, "-")) for key in ("num_warps", "num_stages"))
        lines.append(f"| {name} | {launch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_readme(text):
    readme = HERE / "README.md"
    page = readme.read_text()
    if BEGIN not in page or END not in page:
        raise ValueError(f"{readme} must hold the lines {BEGIN} and {END}: the table goes between them")
    head, tail = page.split(BEGIN)[0], page.split(END)[1]
    readme.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="one case of each kernel, installed Triton, aligned only")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--triton", default=f"installed,{OTHER_TRITON}", help="versions, comma-separated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="also write all results here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
        return 0
    known = {n: c for n, c in cases().items() if args.only in n}
    if args.short:
        known = {c.name: c for c in {id(c.kernel): c for c in reversed(known.values())}.values()}  # the first of each kernel
    if not known:
        raise ValueError(f"no compile case matches --only {args.only!r}")
    versions = ["installed"] if args.short else args.triton.split(",")
    todo = [[n, aligned] for n in known for aligned in ((True,) if args.short else (True, False))]
    results, broken = {}, 0
    for version in versions:
        results[version] = run(version, todo, max(1, args.jobs))
        for (name, aligned), result in sorted(results[version].items()):
            wrong = faults(known[name], result, aligned)
            broken += bool(wrong)
            shown = {k: v for k, v in result.items() if k != "error"}
            variant = name if aligned else f"{name} unaligned"
            print(f"{'FAIL' if wrong else 'ok  '} {label(version)} {variant}: {wrong or ''} {shown}")
    if args.json:
        rows = [{"triton": label(v), "name": n, "aligned": a} | r for v in versions for (n, a), r in results[v].items()]
        args.json.write_text(json.dumps(rows, indent=1))
    if not args.short and not args.only and len(versions) > 1:
        write_readme(table(known, results))
    print(f"{sum(map(len, results.values()))} compiles, {broken} broken")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
