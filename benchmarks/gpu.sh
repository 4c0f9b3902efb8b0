#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: install the package from source, run the GPU tests, then the benchmarks.
#
#   benchmarks/gpu.sh tests               pytest -m gpu; a skipped test counts as a failure
#   benchmarks/gpu.sh sanitize            tests/gpu/sanitize.py under compute-sanitizer
#   benchmarks/gpu.sh bench [ARGUMENTS]   our own times; ARGUMENTS go to convolution.py
#   benchmarks/gpu.sh peers [ARGUMENTS]   the same beside the peers that are installed
#   benchmarks/gpu.sh all                 tests, then peers
#   benchmarks/gpu.sh do 'COMMANDS'       install once, then any of: tests, sanitize, bench, peers, special, convolution NAME ...
#
# WHEELS=DIR   no network: install nothing but our source and the wheels in DIR (a source archive there is built if the
#              package it holds cannot be imported). Without it, pip fetches what the package needs; the peers are
#              optional and never fetched: pip install cuequivariance-jax cuequivariance-ops-jax-cu13 e3j==0.1.3
#              openequivariance openequivariance-extjax (the last with --no-build-isolation and OEQ_NOTORCH=1).
# OUT=DIR      where results go (benchmarks/out)
# PYTHON=python3   WORKERS=8 (test processes)   PYTEST="more arguments"   LIMIT=500 (seconds for the tests)
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
WORKERS=${WORKERS:-8}
root=$PWD
out=$(mkdir -p "${OUT:-benchmarks/out}" && cd "${OUT:-benchmarks/out}" && pwd)
site=$(mktemp -d)
scratch=$(mktemp -d)
trap 'rm -rf "$site" "$scratch"' EXIT
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OEQ_NOTORCH=1 XLA_PYTHON_CLIENT_PREALLOCATE=false

install() {
    local quiet=(-q --disable-pip-version-check --root-user-action=ignore)
    if [[ -z ${WHEELS:-} ]]; then
        "$PYTHON" -m pip install "${quiet[@]}" '.[cuda13,test]'
        return
    fi
    local offline=("${quiet[@]}" --no-index --no-deps --no-compile --upgrade --target "$site")
    "$PYTHON" -m pip install "${offline[@]}" "$WHEELS"/*.whl
    export PYTHONPATH="$site"
    local archive name
    for archive in "$WHEELS"/*.tar.gz; do
        name=$(basename "$archive" | sed 's/-[0-9].*//')
        [[ -e $archive ]] || continue
        if (cd benchmarks && "$PYTHON" -c "import peers; peers.load_toolkit_libraries(); import $name" 2>/dev/null); then
            continue
        fi
        "$PYTHON" -m pip install "${offline[@]}" --no-build-isolation "$archive" || echo "could not build $name"
    done
    "$PYTHON" -m pip install "${offline[@]}" --no-build-isolation .
}

# The tests and benchmarks run where no folder jaxcg can hide the package that was installed.
prepare() {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    install
    tar -cf - --exclude='./.?*' --exclude=./jaxcg --exclude=./benchmarks/out . | tar -xf - -C "$scratch"
    cd "$scratch"
    "$PYTHON" -c 'import jax, jaxcg; print("jax", jax.__version__, jax.devices(), jaxcg.__file__)'
}

tests() {
    timeout "${LIMIT:-500}" "$PYTHON" -m pytest tests/gpu tests/test_handler_gpu.py -m gpu -q -n "$WORKERS" -p no:cacheprovider -p no:benchmark ${PYTEST:-} 2>&1 | tee "$out/tests.log"
    if tail -n 3 "$out/tests.log" | grep -Eq '[0-9]+ skipped'; then
        echo "some GPU tests were skipped"
        return 1
    fi
}

sanitize() {
    local tool
    for tool in memcheck racecheck; do
        XLA_FLAGS=--xla_gpu_autotune_level=0 compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no \
            "$PYTHON" -m tests.gpu.sanitize 2>&1 | tee "$out/sanitize-$tool.log" | tail -n 4
    done
}

convolution() {
    local name=$1
    shift
    "$PYTHON" benchmarks/convolution.py --output "$out/$name.jsonl" "$@" 2>&1 | tee "$out/$name.log"
}

# Odd graphs, products and options, host cost, first calls.
special() {
    "$PYTHON" benchmarks/special.py --output "$out/special.jsonl" "$@" 2>&1 | tee "$out/special.log"
}

bench() {
    convolution bench --implementations jaxcg,jaxcg_mul_ir "$@"
}

peers() {
    convolution peers --implementations jaxcg,jaxcg_mul_ir,oeq,oeq_det,cue,e3j "$@"
}

command=${1:-all}
shift || true
case $command in
    tests | sanitize | bench | peers | all | do) prepare ;;
esac
case $command in
    tests | sanitize | bench | peers) "$command" "$@" ;;
    all)
        tests
        peers
        ;;
    do) eval "$*" ;;
    *)
        sed -n '2,19p' "$root/benchmarks/gpu.sh"
        exit 2
        ;;
esac
