#!/usr/bin/env bash
# The kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer: any report ends the run and fails it. Uses the virtual
# environment .venv and builds into build/sanitize; the extension in src/ stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=$root/.venv/bin/python
tree=$root/build/sanitize
export PATH="$root/.venv/bin:$PATH"

mkdir -p "$tree"
rm -rf "$tree/src" "$tree/tests"
cp -R src tests pyproject.toml "$tree"
rm -f "$tree"/src/halfbyte/kernels/_native*
ln -sfn "$root/cpp" "$tree/cpp"
ln -sfn "$root/CMakeLists.txt" "$tree/CMakeLists.txt"
"$python" -c 'import cmake, ninja, nanobind' || "$python" -m pip install --quiet --constraint constraints.txt cmake ninja nanobind
cmake -S "$tree" -B "$tree/build" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DHALFBYTE_SANITIZE=ON \
    -DPython_EXECUTABLE="$python" > "$tree/configure.log" || { cat "$tree/configure.log"; exit 1; }
cmake --build "$tree/build" -j2 > "$tree/build.log" || { cat "$tree/build.log"; exit 1; }
ls "$tree"/src/halfbyte/kernels/_native* > /dev/null

compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[^=]*=//p' "$tree/build/CMakeCache.txt")
# The C++ library goes in front too: the sanitizer looks up its functions before Python loads it.
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so)"
# pytest holds back what a test writes, which would be lost with the process: reports go to files.
reports=$tree/reports
rm -rf "$reports"
mkdir "$reports"
cd "$tree"
for kernels in native generic; do
    echo "-- kernel tests, sanitized, HALFBYTE_KERNELS=$kernels"
    # Leaks: Python and torch keep what they have until the process ends.
    status=0
    env LD_PRELOAD="$preload" ASAN_OPTIONS="detect_leaks=0:log_path=$reports/$kernels" \
        UBSAN_OPTIONS="print_stacktrace=1:log_path=$reports/$kernels" \
        OMP_NUM_THREADS=1 PYTHONPATH="$tree/src" HALFBYTE_KERNELS="$kernels" \
        "$python" -m pytest -q -p no:cacheprovider -p no:faulthandler tests/kernels \
        tests/refit/test_codec.py tests/refit/test_codec_fuzz.py || status=$?
    for report in "$reports"/*; do
        if [ -e "$report" ]; then
            cat "$report"
            status=1
        fi
    done
    [ "$status" = 0 ] || exit 1
done
