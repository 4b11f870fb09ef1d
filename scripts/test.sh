#!/usr/bin/env bash
# Makes the Python environment and runs the tests in it. Options go to pytest; paths begin at the repository's top:
#   ./scripts/test.sh                                          the quick tests, in two processes: about four minutes
#   ./scripts/test.sh --all                                    all tests: more cases, other GPUs' compilers, Hugging Face
#   ./scripts/test.sh --reverse                                the last test first; --shuffle 7: in a random order
#   ./scripts/test.sh -k attention -x                          tests whose name matches, until the first failure
#   ./scripts/test.sh -n 0 -s tests/versions/test_training.py  one file, in one process, with what it prints
# Uses the PyTorch of the current python3 if it has one. With the oldest supported versions, in .venv-oldest:
#   TINY_LLAMA_SET=oldest ./scripts/test.sh
[ "${BASH##*/}" = bash ] || exec bash "$0" "$@" # called as sh test.sh
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common/machine/environment.sh"
[[ ${1:-} != -h && ${1:-} != --help ]] || { usage && exit 0; }
group=test which=(-m "not slow")
if [[ ${1:-} == --all ]]; then
    group=all which=()
    shift
fi
use_environment "$group"
cd -- "$ROOT"
exec "$PYTHON" -m pytest -n 2 --dist worksteal --durations 10 "${which[@]}" "$@"
