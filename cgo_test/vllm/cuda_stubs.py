#!/usr/bin/env python3
"""Let torch's CUDA build load on a machine without the CUDA libraries, for an engine that runs on the CPU.

torch's shared objects name libcudart, libcublas, libcudnn and more as needed, so the loader wants them although a CPU
engine calls none of them. For each one that is missing this compiles an empty library that has the symbols torch
refers to; every function returns 100, CUDA's "no device". torch is also told that it was built without CUDA, for the
nixl package chooses its build by that. vLLM and NIXL are left as they are.
"""
import collections
import pathlib
import re
import subprocess
import sysconfig
import tempfile

TORCH = pathlib.Path(sysconfig.get_path("purelib"), "torch")
LIB = TORCH / "lib"
# What the system has; torch brings its own copy of the rest.
SYSTEM = re.compile(r"(ld-linux|libgomp|lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+)\.so)")


def lines(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def needed(path):
    return [m[1] for line in lines("readelf", "-d", path) if (m := re.search(r"\(NEEDED\).*\[(.+)\]", line))]


def version_owners(path):
    """Symbol version → the library that is to define it."""
    owners, library = {}, None
    for line in lines("readelf", "-VW", path):
        if m := re.search(r"Version: \d+\s+File: (\S+)", line):
            library = m[1]
        elif library and (m := re.search(r"Name: (\S+)\s+Flags", line)):
            owners[m[1]] = library
    return owners


def compile_stub(library, symbols):
    """symbols: version ("" for none) → names"""
    with tempfile.TemporaryDirectory() as work:
        source, script = pathlib.Path(work, "stub.c"), pathlib.Path(work, "stub.map")
        names = sorted(set().union(*symbols.values()))
        source.write_text("static int empty;\n" + "".join(f"int {n}(void) {{ return 100; }}\n" for n in names))
        script.write_text("".join(f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in sorted(symbols.items()) if version))
        link = [f"-Wl,--version-script={script}"] if any(symbols) else []
        subprocess.run(["cc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", LIB / library, source, *link], check=True)


def main():
    objects = [p for p in LIB.glob("*.so") if re.match(r"lib(torch|c10|shm)", p.name)]
    missing = sorted({n for p in objects for n in needed(p) if not SYSTEM.match(n) and not (LIB / n).exists()})
    owners, wanted, defined = {}, set(), set()
    for path in objects:
        owners |= version_owners(path)
        for line in lines("nm", "-D", "--with-symbol-versions", path):
            *_, kind, symbol = line.split()
            (wanted if kind == "U" else defined).add(symbol)
    stubs = {library: collections.defaultdict(set) for library in missing}
    for symbol in wanted:
        name, _, version = symbol.partition("@")
        version = version.lstrip("@")
        if owners.get(version) in stubs:
            stubs[owners[version]][version].add(name)
        elif not version and name not in defined and re.match(r"_*(cu|nccl|nv)", name):
            # A symbol without a version may come from any library.
            stubs[missing[0]][""].add(name)
    for library, symbols in stubs.items():
        compile_stub(library, symbols)
    version_py = TORCH / "version.py"
    version_py.write_text(re.sub(r"^(cuda\b.*?) = '[^']*'$", r"\1 = None", version_py.read_text(), flags=re.MULTILINE))


if __name__ == "__main__":
    main()
