# Sourced by bench/setup-peers and test-torch-version.
# shellcheck shell=bash

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

# The folder of torch's libraries in the environment of the interpreter $1.
torch_libraries() {
    "$1" -c 'import sysconfig; print(sysconfig.get_path("platlib") + "/torch/lib")'
}
