#!/bin/sh
# Builds the decoders with AddressSanitizer and UndefinedBehaviorSanitizer and feeds them mutated streams.
#     tests/fuzz/run.sh [ROUNDS [BUILD_FOLDER]]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=${2:-$here/../../build/sanitize}
cmake -S "$here/../.." -B "$build" -DDCR_NATIVE=OFF -DDCR_SANITIZE=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$build" --target fuzz_decoders
exec "$build/fuzz_decoders" "${1:-200000}" "$here"/corpus/*
