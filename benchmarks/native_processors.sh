#!/bin/sh
# Run the native engine's tests with AVX-512, AVX2 and neither, as on older x86 processors.
# Usage: benchmarks/native_processors.sh [python] [arguments of pytest]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$root/.venv/bin/python}
[ $# -gt 0 ] && shift
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r "$root/src" "$copy/src"
include=$("$python" -c "import sysconfig; print(sysconfig.get_path('include'))")
for kind in AVX-512 AVX2 neither; do
    cd "$copy/src/canter/engines/native"
    case $kind in
        AVX2) sed -i '/supports("avx512f")/,/AVX512;/d' processors.c ;;
        neither) sed -i '/^#ifdef HAS_X86/,/^#endif/d' processors.c ;;
    esac
    gcc -shared -fPIC -O3 -std=gnu11 -pthread -fno-math-errno -fno-trapping-math -I"$include" ./*.c -o _native.abi3.so -lm
    cd "$root"
    echo "$kind:"
    PYTHONPATH=$copy/src "$python" -m pytest -q -p no:cacheprovider tests/engines/native "$@" | tail -n 3
done
