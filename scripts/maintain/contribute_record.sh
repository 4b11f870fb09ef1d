#!/usr/bin/env bash
# Makes a record of this machine's GPU to contribute: tests Triton's kernels on it, measures the four versions and each
# kernel alone, and says what to send. See .github/CONTRIBUTING.md.
#   ./scripts/maintain/contribute_record.sh                     at most 30 minutes, into scripts/recorded/contributed/GPU_DATE
#   ./scripts/maintain/contribute_record.sh --time-limit 600    at most 10 minutes; the same command again does the rest
#   ./scripts/maintain/contribute_record.sh --folder FOLDER     somewhere else, or to go on on another day
# Exit status: 0 the record is complete; 1 a test failed or something is left; 2 for a bad option or without a GPU.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/../common/environment.sh"
refuse() { echo "contribute_record.sh: $1" >&2 && exit 2; }

limit=1800 folder=''
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help) usage && exit 0 ;;
        --time-limit) limit=${2:-} ;;
        --folder) folder=${2:-} ;;
        *) refuse "$1 is unknown; --help shows the options" ;;
    esac
    [[ -n ${2:-} && $limit =~ ^[1-9][0-9]*$ ]] || refuse "$1 needs a value; --help shows the options"
    shift 2
done

use_environment test
if [[ -z $folder ]]; then
    name=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")')
    [[ -n $name ]] || refuse "PyTorch sees no GPU here, and a record is of a GPU"
    name=$(tr '[:upper:]' '[:lower:]' <<<"$name" | sed 's/[^a-z0-9]\{1,\}/-/g; s/-$//')
    folder=$ROOT/scripts/recorded/contributed/${name}_$(date +%F)
fi
mkdir -p "$folder"

SECONDS=0 # the limit is for measuring: what is downloaded before does not count
status=0
if [[ ! -e $folder/tests.txt ]]; then
    echo "Testing version 3's kernels on this GPU"
    if (cd "$ROOT" && timeout "$limit" "$PYTHON" -m pytest -q tests/kernels) >"$folder/tests.log" 2>&1; then
        sed "s|$ROOT/||g" "$folder/tests.log" >"$folder/tests.txt"
    else
        echo "The tests failed or took too long, see $folder/tests.log: please open an issue with that file." >&2
        status=1
    fi
fi
TINY_LLAMA_PYTHON=$PYTHON "$ROOT/scripts/maintain/record.sh" "$folder" --only headline,kernels \
    --time-limit "$((limit > SECONDS ? limit - SECONDS : 1))" || status=1
"$PYTHON" "$ROOT/scripts/maintain/ladder.py" --write

[[ $status -ne 0 ]] || cat <<END
The record is complete. To contribute it:
    git switch -c record-$(basename "$folder")
    git add README.md '$folder'
    git commit -m 'Recorded on $(basename "$folder")'
and open a pull request; .github/CONTRIBUTING.md says what is looked at.
END
exit $status
