# Sourced by test, test-torch-version and bench/setup-peers: torch's default build without NVIDIA's libraries.
# shellcheck shell=bash

# Installs torch $2 ("2.5.1", "2.8.*") for the interpreter $1 without the 3 GB of NVIDIA libraries that its default build
# depends on. Python compiles what a program imports, which is less than half of torch.
install_bare_torch() {
    local python=$1 lib install=(install --quiet --no-compile --no-cache-dir --no-deps "torch==$2")
    quietly "$python" -m pip "${install[@]}" --index-url "$torch_cpu_index" 2>/dev/null ||
        quietly "$python" -m pip "${install[@]}"
    quietly "$python" -m pip install --quiet filelock typing-extensions sympy networkx jinja2 fsspec setuptools numpy
    lib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib") + "/torch/lib")')
    [[ ! -e $lib/libtorch_cuda.so ]] || make_stand_ins "$lib"
    quietly "$python" -c 'import torch'
}

# Installs the requirements of the extra "ipex" for the interpreter $1; 0.9 GB to download if pip finds no CPU build.
install_ipex() {
    local requirement requirements
    requirements=$(extra_requirements "$1" ipex)
    for requirement in $requirements; do
        case $requirement in
            torch==*) install_bare_torch "$1" "${requirement#torch==}" ;;
            *) quietly "$1" -m pip install --quiet --no-compile "$requirement" ;;
        esac
    done
    quietly "$1" -m pip install --quiet intel-openmp
}

# Prints the requirements of the extra $2 of this project that apply to the interpreter $1, one per line.
extra_requirements() {
    "$1" -c '
import sys, tomllib
from pip._vendor.packaging.requirements import Requirement
with open(sys.argv[1], "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
for requirement in map(Requirement, extras[sys.argv[2]]):
    if requirement.marker is None or requirement.marker.evaluate():
        print(f"{requirement.name}{requirement.specifier}")
' "$root/pyproject.toml" "$2"
}

# Creates stub libraries in the folder $1. The default build of torch links to CUDA libraries: a program on CPUs calls
# none of their functions, but the loader needs the files. Every function of a stub returns cudaErrorNoDevice (100).
make_stand_ins() {
    local lib=$1 libraries undefined library version names work
    libraries=("$lib"/lib{torch,c10,caffe2}*.so)
    work=$(mktemp -d)
    undefined=$(nm -D --undefined-only "${libraries[@]}" | awk '{ print $NF }' | sort -u)
    readelf -VW "${libraries[@]}" >"$work/needed"
    for library in $(readelf -d "${libraries[@]}" | sed -n 's/.*(NEEDED).*\[\(lib\(cu\|nccl\|nv\)[^]]*\)\]/\1/p' | sort -u); do
        [[ ! -e $lib/$library ]] || continue # Included in this build.
        # Functions with the library's symbol version; a library without versions gets all functions that have none.
        version=$(grep -A1 -F " File: $library " "$work/needed" | sed -n 's/.* Name: \([^ ]*\) .*/\1/p' | head -n 1 || true)
        names=$(grep -F "@${version:-none}" <<<"$undefined" | cut -d@ -f1 ||
            grep -E '^(nccl|cusparseLt|cuFile|curand)[A-Z][A-Za-z0-9_]*$' <<<"$undefined")
        awk '{ print "int " $1 "(void) { return 100; }" }' <<<"$names" >"$work/code.c"
        printf '%s { global: *; };\n' "${version:-$library}" >"$work/versions"
        quietly gcc -shared -fPIC -w -Wl,-soname,"$library" -Wl,--version-script="$work/versions" \
            -o "$lib/$library" "$work/code.c"
    done
    rm -r "$work"
}
