#!/bin/sh
# Builds the checks of the kernels and the fuzz of the decoders, which need no Python, and runs both: here under
# AddressSanitizer and UndefinedBehaviorSanitizer, or for aarch64 under qemu-user (on Debian: g++-aarch64-linux-gnu and
# qemu-user).
#     tests/native/run.sh [aarch64] [CHECK_ROUNDS [FUZZ_ROUNDS]]
set -eu
cd "$(dirname "$0")/../.."
if [ "${1:-}" = aarch64 ]; then
    shift
    compile="aarch64-linux-gnu-g++ -O2 -static" run=qemu-aarch64
else
    compile="${CXX:-g++} -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" run=
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for source in kernels/cpu/*.cpp tests/native/kernels.cpp tests/fuzz/decoders.cpp; do
    $compile -std=c++20 -Wall -Wextra -Ikernels -c "$source" -o "$folder/$(echo "$source" | tr / -).o"
done
$compile "$folder"/kernels-cpu-*.o "$folder/tests-native-kernels.cpp.o" -o "$folder/check_kernels"
$compile "$folder"/kernels-cpu-*.o "$folder/tests-fuzz-decoders.cpp.o" -o "$folder/fuzz_decoders"
$run "$folder/check_kernels" "${1:-100}"
$run "$folder/fuzz_decoders" "${2:-200000}" tests/fuzz/corpus/*
