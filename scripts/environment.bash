# Sourced by the other scripts: creates one virtual environment per purpose, installs into it once and reuses it.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
torch_version=2.13.0
torch_cpu_index=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}

say() { printf '==> %s\n' "$*"; }

fail() {
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

# Runs a command and prints its output only if it fails.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 || status=$?
    if ((status != 0)); then
        printf 'failed (exit code %d): %s\n' "$status" "$*" >&2
        tail -n 40 "$log" >&2
    fi
    rm -f "$log"
    return "$status"
}

# Prints the first Python that is new enough and can create virtual environments; $PYTHON is tried first.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with the venv module (seen: $(python3 --version 2>&1 || true))" \
        "PYTHON=/path/to/python $0   (Debian, Ubuntu: apt-get install python3-venv)"
}

# Creates the virtual environment $root/$1 unless it exists, and sets venv_python.
use_environment() {
    local directory=$root/$1 python
    venv_python=$directory/bin/python
    if ! "$venv_python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        say "creating $1 with $python ($("$python" --version))"
        quietly "$python" -m venv --clear "$directory"
    fi
}

# Installs the packages $2… with pip, unless the stamp $1 shows that they were installed for the same project files.
install_packages() {
    local name=$1 stamp fingerprint
    shift
    stamp=$(dirname "$venv_python")/../installed-$name
    fingerprint=$(cat "$root"/pyproject.toml "$root"/scripts/{environment.bash,build_hook.py} "$root"/cpulaunch/lib/*.[ch] |
        cksum)" $*"
    [[ -f $stamp && $(<"$stamp") == "$fingerprint" ]] && return
    say "installing $* (pip)"
    quietly "$venv_python" -m pip install --quiet "$@"
    # pip writes bytecode for the files it copies, not for an --editable package.
    quietly "$venv_python" -m compileall -q "$root/cpulaunch"
    printf '%s' "$fingerprint" >"$stamp"
}

# Installs the CPU build of torch: from pip's default index if that has one, else from PyTorch's CPU index.
install_torch() {
    local found
    found=$("$venv_python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
    [[ ${found%%+*} == "$torch_version" ]] && return
    local index=()
    if [[ -n ${TORCH_INDEX_URL:-} ]]; then
        index=(--index-url "$TORCH_INDEX_URL")
    elif resolves_to_cpu_build; then
        index=()
    elif resolves_to_cpu_build --index-url "$torch_cpu_index"; then
        index=(--index-url "$torch_cpu_index")
    else
        fail "no CPU build of torch $torch_version for $("$venv_python" --version) in pip's index or $torch_cpu_index" \
            "TORCH_INDEX_URL=https://… $0"
    fi
    say "installing torch $torch_version, CPU build (pip)"
    quietly "$venv_python" -m pip install --quiet "torch==$torch_version" "${index[@]}"
}

# Whether pip, with these options, would install a CPU build ("+cpu" in the version).
resolves_to_cpu_build() {
    "$venv_python" -m pip install --dry-run --no-deps --ignore-installed "torch==$torch_version" "$@" 2>/dev/null |
        grep -q "Would install torch-$torch_version+cpu"
}

# Installs Debian packages that are missing; without root or apt, prints their names and continues.
install_system_packages() {
    local package missing=()
    command -v dpkg-query >/dev/null || { say "not a Debian system: install the equivalents of $*"; return 0; }
    for package in "$@"; do
        [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    ((${#missing[@]} == 0)) && return
    if ((EUID != 0)); then
        say "continuing without ${missing[*]}; to install, as root: apt-get install ${missing[*]}"
        return 0
    fi
    say "installing ${missing[*]} (apt-get)"
    export DEBIAN_FRONTEND=noninteractive
    # Another of these scripts may be updating the lists, for which apt-get does not wait.
    quietly flock --close "$root" apt-get -qq -o Acquire::Retries=3 update || true
    # Another apt-get may hold the lock for as long as it installs.
    quietly apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=600 install --yes --no-install-recommends \
        "${missing[@]}" ||
        say "apt-get failed; continuing without ${missing[*]}"
}
