# Makes .venv with the package and what it depends on. Sourced by scripts/train and scripts/test:
#
#     setup_env         the package and what it needs to run
#     setup_env dev     the same, with what the tests need
#
# Afterwards $VENV_PYTHON is the interpreter to use, and the environment suits Paddle on this processor.
# PYTHON=/path/to/python chooses the interpreter that .venv is made from.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
VENV_PYTHON=$VENV/bin/python
STAMP=$VENV/hp_sharding_installed
OLDEST_MINOR=10
NEWEST_MINOR=13 # Paddle 3.3 has wheels for Python 3.10 to 3.13

say() { printf '== %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Prints "3.11" and succeeds if $1 is a Python that Paddle has wheels for; prints nothing if it cannot run.
python_version() {
    "$1" -c "
import sys
print('%d.%d' % sys.version_info[:2])
sys.exit(not (3, $OLDEST_MINOR) <= sys.version_info[:2] <= (3, $NEWEST_MINOR))" 2>/dev/null
}

# Leaves a suitable interpreter in $BASE_PYTHON.
find_python() {
    local candidate version seen=""
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python}; do
        if version=$(python_version "$candidate"); then
            if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
                BASE_PYTHON=$candidate
                return
            fi
            seen="$seen $candidate is $version but lacks the venv module (Debian: apt install python3-venv);"
        elif [ -n "$version" ]; then
            seen="$seen $candidate is $version;"
        fi
    done
    fail "no suitable Python. hp_sharding needs Python 3.$OLDEST_MINOR to 3.$NEWEST_MINOR, for which Paddle 3.3 has" \
        "wheels. Found:${seen:- none;} install one, or point to it: PYTHON=/path/to/python $0"
}

make_venv() {
    if [ -x "$VENV_PYTHON" ] && python_version "$VENV_PYTHON" >/dev/null && "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        return
    fi
    find_python
    say "making .venv with $BASE_PYTHON ($(python_version "$BASE_PYTHON"))"
    "$BASE_PYTHON" -m venv --clear "$VENV" || fail "could not make $VENV"
}

# What an installation depends on: change any of it and the package is installed again.
wanted_stamp() {
    printf '%s ' "$ROOT" "$("$VENV_PYTHON" -V)"
    cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml" | cksum
}

install_package() {
    local extra=$1 wanted
    wanted=$(wanted_stamp)
    # The stamp's last line names the extra; "dev" includes everything that training needs.
    if [ -f "$STAMP" ] && [ "$(head -n 1 "$STAMP")" = "$wanted" ] && [[ -z $extra || $(tail -n 1 "$STAMP") = "$extra" ]]; then
        say "hp_sharding is installed in .venv"
        return
    fi
    say "installing hp_sharding${extra:+ [$extra]} into .venv (the first time about 200 MB are fetched)"
    if ! "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --editable "$ROOT${extra:+[$extra]}"; then
        fail "pip could not install hp_sharding; its own message stands above. If it could not reach an index: this" \
            "first installation needs the network (behind a proxy or with a mirror set https_proxy or PIP_INDEX_URL)." \
            "Then run $0 again; it goes on where it stopped"
    fi
    printf '%s\n%s\n' "$wanted" "$extra" >"$STAMP"
}

# Paddle's wheels carry an MKL that picks slow kernels on AMD processors; one core for each rank.
tune_for_processor() {
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export MKL_NUM_THREADS=${MKL_NUM_THREADS:-$OMP_NUM_THREADS}
    if grep -q AuthenticAMD /proc/cpuinfo 2>/dev/null; then
        export MKL_DEBUG_CPU_TYPE=${MKL_DEBUG_CPU_TYPE:-5}
    fi
}

setup_env() {
    make_venv
    install_package "${1:-}"
    tune_for_processor
}
