# Sourced by bench/setup-peers and test-torch-version.
# shellcheck shell=bash

# torch's default build links to CUDA's libraries. A program that runs on CPUs calls none of their functions, but the
# loader wants the files: small libraries take their place, in which every function returns cudaErrorNoDevice (100).
make_stand_ins() {
    local lib=$1 libraries undefined library version names work
    libraries=("$lib"/lib{torch,c10,caffe2}*.so)
    work=$(mktemp -d)
    undefined=$(nm -D --undefined-only "${libraries[@]}" | awk '{ print $NF }' | sort -u)
    readelf -VW "${libraries[@]}" >"$work/needed"
    for library in $(readelf -d "${libraries[@]}" | sed -n 's/.*(NEEDED).*\[\(lib\(cu\|nccl\|nv\)[^]]*\)\]/\1/p' | sort -u); do
        [[ ! -e $lib/$library ]] || continue # Part of this build.
        # Functions with the library's version; libraries without versions get all that have none.
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
