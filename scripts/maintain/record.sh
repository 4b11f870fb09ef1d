#!/usr/bin/env bash
# Measure on this machine's GPU what the pages show. The results go into one folder, which has a folder for each part.
#
#   ./scripts/maintain/record.sh scripts/recorded/DEVICE_DATE                    all parts
#   ./scripts/maintain/record.sh FOLDER --only headline,kernels                  some of them
#   ./scripts/maintain/record.sh FOLDER --time-limit 560                         stop in time; run it again for the rest
#   ./scripts/maintain/record.sh FOLDER --toy                                    try it at toy sizes, on a CPU too
#
# The first number of minutes ends a part. The second is what we expect on an H100, from the record of 2026-11-26. With
# several GPUs, start it once for each: CUDA_VISIBLE_DEVICES=N, the same FOLDER, other parts. Peers go first, because the
# ladders and vocabularies read their results, and ddp by itself.
#
# part                 minutes  what
# peers                15    6  the ways to run Hugging Face's model with the medium preset, each started once. The
#                               fastest become the strongest stack
# peers-small          15    3  the same with the small preset
# peers-long           15    6  the same with the medium preset and sequences of 4,096 tokens
# peers-autotuned      15    8  the way whose compiler takes minutes, with the medium preset
# ladder-medium        25   11  the rungs of the ladder in rounds, with a graph
# ladder-medium-eager  25   15  the same without a graph
# ladder-small         15    4  the small preset, with a graph
# ladder-small-eager   15    6  the same without a graph
# ladder-long          15    7  versions 2 to 4 and Hugging Face's model, sequences of 4,096 tokens, with a graph
# vocabulary-1000      25    6  whole logits, version 3's fused loss and Liger's, with the medium preset
# vocabulary-32000     25    9  the same with 32,000 vocabulary entries
# vocabulary-128256    25   11  the same with 128,256 entries
# headline             30   20  all versions and Hugging Face's model: presets, precisions, default options; version 1
#                               also not deterministic
# graph                15    5  the same steps with and without a graph, in bfloat16
# kernels               8    1  each of version 3's kernels on its own
# ablation2            25   10  version 2's switches: each alone, all but one, all
# ablation3            25   13  the same for version 3's kernels
# start-small          30   20  seconds from a script's start to its first step, with empty and with filled caches:
#                               three starts of each
# start-medium         30   20  the same with the medium preset
# timeline              5    2  when each kernel of a step runs, versions 1 and 4
# trace                 5    2  one step of versions 1 and 4 for Perfetto: the page "read a trace"
# stages               10    3  the debugging exercise
# memory               10    6  peak memory for several sequence lengths
# ddp                  20   15  DDP and FSDP2 on all GPUs, if there are several: versions 3 and 4, Hugging Face's model
#
# If --time-limit ends a part, run the same command again on the same machine. headline, graph and ddp save each row, and
# the ladder, peers, vocabularies and start-* save each start. On another machine, the first three repeat the round that
# wasn't finished, start-* refuses, and the others begin a new column. An ablation without time for all its rounds starts
# over. headline and graph run each row once, because the pages take their ratios from the ladder, which starts every
# process three times. If the files are a copy without Git's history, name the commit with TINY_LLAMA_COMMIT.
# Afterwards: python scripts/maintain/ladder.py --write --draw, and python scripts/maintain/counted_tables.py --write
# Exit status: 0 everything is measured; 1 something failed or is left; 2 a bad option.

set -uo pipefail

# shellcheck source=../common/machine/wrappers/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common/machine/wrappers/setup.sh"

root=${SCRIPTS%/*} limit=86400 only='' folder='' toy=()
sizes=(--presets 'small,medium' --repeats 1 --compile-first 13) small=(--preset small --use-amp)
medium=(--preset medium --use-amp) rounds=5
long=medium short=small captured=on columns=() vocabularies=(1000 32000 128256)
sequences=(--seq-len 4096 --batch-size 2)
lengths=(--preset medium --batch-size 4 --use-amp --seq-lengths '512,1024,2048,4096') stage=()
starts=(--rungs "b,g,h,j,k,peer,updated" --rounds 3)
while [[ $# -gt 0 ]]; do
    TAKEN=1
    case $1 in
        -h | --help) usage && exit 0 ;;
        --toy) toy=(--hidden-dim 32 --num-layers 1 --num-heads 2 --vocab-size 64) ;;
        --only) value_of "$@" && only=$VALUE ;;
        --time-limit) value_of "$@" && limit=$VALUE ;;
        -*) fail 2 "unknown option $1; --help lists them" ;;
        *)
            [[ -z $folder ]] || fail 2 "one folder, got $folder and $1"
            folder=$1
            ;;
    esac
    shift "$TAKEN"
done
[[ $limit =~ ^[1-9][0-9]*$ ]] || fail 2 "--time-limit needs a positive number, got $limit"
[[ -n $folder ]] || fail 2 "name the folder for the results; --help shows how"
mkdir -p "$folder" 2>/dev/null && [[ -w $folder ]] || fail 2 "$folder cannot be written: choose another folder"
folder=$(CDPATH="" cd "$folder" && pwd)
find_python
gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') ||
    fail 2 "$PYTHON has no PyTorch: run scripts/quickstart.sh first, or set TINY_LLAMA_PYTHON"
[[ $gpus -gt 0 || ${#toy[@]} -gt 0 ]] || fail 2 "PyTorch sees no GPU here, and we don't record times of a CPU"
if [[ ${#toy[@]} -gt 0 ]]; then
    sizes=(--presets tiny --repeats 2 --batch-sizes 2 --seq-lengths 16 --num-steps 3 "${toy[@]}")
    lengths=("${toy[@]}" --batch-size 2 --seq-lengths '16,32') stage=("${toy[@]}" --batch-size 2 --seq-len 16)
    small=("${stage[@]}" --num-steps 3) medium=("${stage[@]}" --num-steps 3) rounds=1
    long=tiny short=tiny captured=off # a CPU has no graphs
    vocabularies=(64 128)
    columns=(--starts 1 --rounds 1 --num-steps 3 "${stage[@]}")
    sequences=(--seq-len 32 --batch-size 2)
    starts=(--rungs b --rounds 1 "${stage[@]}")
fi
parts=(peers peers-small peers-long peers-autotuned)
parts+=(ladder-medium ladder-medium-eager ladder-small ladder-small-eager ladder-long)
parts+=("${vocabularies[@]/#/vocabulary-}" headline graph kernels ablation2 ablation3)
parts+=(start-small start-medium timeline trace stages memory)
[[ $gpus -lt 2 ]] || parts+=(ddp)
for name in ${only//,/ }; do
    [[ " ${parts[*]} " == *" $name "* ]] || fail 2 "--only: $name isn't one of ${parts[*]}"
done
left=() # what failed or is left

# part NAME MINUTES COMMAND...: runs the command in the part's folder, unless its record says that it is complete.
# The command may take its minutes, or what is left of --time-limit; SECONDS_LEFT in it becomes half a minute less.
part() {
    local name=$1 place=$folder/$1 start=$SECONDS status seconds=$((60 * $2))
    shift 2
    [[ -z $only || ,$only, == *,$name,* ]] || return 0
    [[ $seconds -lt $((limit - SECONDS)) ]] || seconds=$((limit - SECONDS))
    if [[ -e $place/record.json ]]; then
        echo "$name: kept"
    elif [[ $seconds -lt 60 ]]; then
        echo "$name: no time left"
        left+=("$name")
    else
        mkdir -p "$place"
        set -- "${@/#SECONDS_LEFT/$((seconds - 30))}"
        "$PYTHON" "$SCRIPTS/maintain/provenance.py" "$(basename "$1")" "${@:2}" >"$place/started.json" &&
            (cd "$place" && timeout --kill-after=20 "$seconds" "$@") >>"$place/log.txt" 2>&1
        status=$?
        if [[ $status -eq 0 ]]; then
            mv "$place/started.json" "$place/record.json"
            echo "$name: done in $((SECONDS - start)) s"
        else
            echo "$name: status $status, see $place/log.txt: $(tail -n 1 "$place/log.txt")"
            left+=("$name")
        fi
    fi
}

suite() { # NAME MINUTES OPTION...
    part "$1" "$2" "$PYTHON" "$SCRIPTS/benchmark_suite.py" --results . --append --time-limit SECONDS_LEFT \
        "${sizes[@]}" "${@:3}"
}

ablation() { # VERSION OPTION...
    part "ablation$1" 25 "$PYTHON" "$SCRIPTS/fusion_ablation_study.py" --version "$1" --rounds $rounds "${@:2}" \
        --time-limit SECONDS_LEFT --json ablation.json
}

[[ $gpus -lt 2 || ${#toy[@]} -gt 0 ]] || sizes+=(--spread) # a GPU for each preset: half the time

rungs() { # NAME MINUTES OPTION...
    part "$1" "$2" "$PYTHON" "$SCRIPTS/maintain/measure_ladder.py" --results . --append \
        --time-limit SECONDS_LEFT "${@:3}"
}

start() { # NAME PRESET
    part "start-$1" 30 "$PYTHON" "$SCRIPTS/maintain/warm_up.py" --results . --append --time-limit SECONDS_LEFT \
        --presets "$2" "${starts[@]}"
}

rungs peers-small 15 --peer-variants --presets "$short" --graph "$captured" "${columns[@]}"
rungs peers 15 --peer-variants --presets "$long" --graph "$captured" "${columns[@]}"
rungs peers-long 15 --peer-variants --presets "$long" --graph "$captured" "${columns[@]}" "${sequences[@]}"
rungs peers-autotuned 15 --peer-variants --rungs autotuned --presets "$long" --graph "$captured" "${columns[@]}"
at_small=(--presets "$short" --tuned ../peers-small/peers.json)
at_medium=(--presets "$long" --tuned ../peers/peers.json)
at_length=(--presets "$long" --tuned ../peers-long/peers.json)
rungs ladder-medium 25 "${at_medium[@]}" --graph "$captured" "${columns[@]}"
rungs ladder-medium-eager 25 "${at_medium[@]}" --graph off "${columns[@]}"
rungs ladder-small 15 "${at_small[@]}" --graph "$captured" "${columns[@]}"
rungs ladder-small-eager 15 "${at_small[@]}" --graph off "${columns[@]}"
rungs ladder-long 15 "${at_length[@]}" --graph "$captured" --rungs 'g,h,i,k,peer,peer fp8,library,library fp8' \
    "${columns[@]}" "${sequences[@]}"
for entries in "${vocabularies[@]}"; do
    rungs "vocabulary-$entries" 25 --vocabularies "$entries" "${at_medium[@]}" --graph "$captured" "${columns[@]}"
done
peers=hf+compile:float32:bfloat16:fp8,hf+compile+packed:bfloat16:fp8,liger:bfloat16
suite headline 30 --models "v1,v1+nodet,v2,v2+compile,v3,v4,$peers" --precisions float32,tf32,bfloat16,fp8
suite graph 15 --models v1+nodet,v2,v2+compile,v3,v4 --precisions bfloat16 --graph on,off \
    --metrics throughput,memory
part kernels 8 "$PYTHON" "$SCRIPTS/benchmark_kernels.py" --json kernels.json
# With the small preset, version 2's ablation would measure the CPU, because it launches from Python.
ablation 2 "${medium[@]}"
ablation 3 "${small[@]}" --switches "rmsnorm-kernel,rope-kernel,swiglu-kernel,attention-kernel,loss-kernel"
start small "$short"
start medium "$long"
part timeline 5 "$PYTHON" "$SCRIPTS/maintain/timeline.py" "${small[@]}" --json timeline.json
part trace 5 "$PYTHON" "$SCRIPTS/maintain/timeline.py" "${small[@]}" --traces .
part stages 10 "$root/version3_triton/exercises/performance_debugging/run_all_stages.sh" \
    --output-dir "$folder/stages" "${stage[@]}"
part memory 10 "$PYTHON" "$SCRIPTS/analyze_memory_scaling.py" "${lengths[@]}" --time-limit SECONDS_LEFT --json memory.json
if [[ $gpus -gt 1 ]]; then
    counts=$(for n in 1 2 4 8; do [[ $n -gt $gpus ]] || echo "$n"; done | paste -sd, -)
    sizes=(--presets medium --repeats 2 --precisions bfloat16 --metrics 'throughput,memory' --nproc "$counts")
    suite ddp 20 --models v3,v4,v3+fsdp,hf+compile+packed,hf+compile+fsdp
fi

if [[ ${#left[@]} -gt 0 ]]; then
    echo "not complete yet: ${left[*]}; run the same command again"
    exit 1
fi
echo "complete: $folder"
