#!/bin/sh
# Run the native engine's tests under the address and undefined-behaviour sanitizers, on a copy of the sources.
# Usage: benchmarks/native_sanitize.sh [python] [arguments of pytest]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
[ $# -gt 0 ] && shift
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$root/src" "$copy/src"
folder=$copy/src/canter/engines/native
include=$("$python" -c "import sysconfig; print(sysconfig.get_path('include'))")
cd "$folder"
rm -f _native*.so
gcc -shared -fPIC -g -O1 -std=gnu11 -pthread -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-unused-parameter \
    -Wno-sign-compare -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer \
    -I"$include" ./*.c -o _native.abi3.so -lm
cd "$root"
# Leak detection is off, since Python never frees everything. The test of memory growth is left out, since sanitizers
# delay freeing: run it without them.
PYTHONPATH=$copy/src ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    "$python" -m pytest -n 0 -q -p no:cacheprovider -k "not memory_grows" tests/engines/native "$@"
