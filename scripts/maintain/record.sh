#!/usr/bin/env bash
# Measures on this machine's GPUs what the pages show, into one folder. What is there already is kept: a run that was
# cut off goes on.
#
#   ./scripts/maintain/record.sh scripts/recorded/DEVICE_DATE      one to two hours on one GPU
#   ./scripts/maintain/record.sh FOLDER --time-limit 560           start nothing that would not end; again: the rest
#   ./scripts/maintain/record.sh FOLDER --only suite,kernels       some of: suite kernels scaling links communication
#                                                                  report ablation2 ablation3 stages pages wrappers
#   ./scripts/maintain/record.sh FOLDER --repeats 1                processes of each case of the suite (3)
#   ./scripts/maintain/record.sh FOLDER --commit HASH              where the files are a copy without Git's history
#
# scaling, links and communication need several GPUs, and the suite uses all; what needs one alone runs side by side
# where there are several. Afterwards: python scripts/maintain/ladder.py --write, python scripts/model_counts.py --write.
# Exit status: 0 all is there; 1 something failed or is left; 2 a bad option.

set -uo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${TINY_LLAMA_PYTHON:-python3}
limit=86400
repeats=3
commit=()
only=
folder=

fail() {
    echo "record.sh: $1" >&2
    exit 2
}

while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help)
            sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --time-limit | --repeats | --only | --commit)
            [[ $# -gt 1 ]] || fail "$1 needs a value"
            [[ $1 == --only || $1 == --commit || $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 needs a positive number, not $2"
            case $1 in
                --time-limit) limit=$2 ;;
                --repeats) repeats=$2 ;;
                --only) only=,$2, ;;
                --commit) commit=(--commit "$2") ;;
            esac
            shift 2
            ;;
        -*) fail "unknown option $1; --help lists them" ;;
        *)
            [[ -z $folder ]] || fail "one folder, not $folder and $1"
            folder=$1
            shift
            ;;
    esac
done
[[ -n $folder ]] || fail "name the folder for the results; --help shows how"
mkdir -p "$folder" 2>/dev/null && [[ -w $folder ]] || fail "$folder cannot be written: choose another folder"
folder=$(cd "$folder" && pwd)

if ! gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())'); then
    fail "$python has no PyTorch: run scripts/quickstart.sh first, or set TINY_LLAMA_PYTHON"
fi
[[ $gpus -gt 0 ]] || fail "PyTorch sees no GPU here: figures of a CPU are none of this workshop's"

missing=() # what failed or is left

seconds_left() {
    echo $((limit - SECONDS))
}

# step NAME SECONDS RESULT COMMAND...: runs the command, unless its result is there or it could not end in time.
step() {
    local name=$1 needs=$2 result=$folder/$3
    shift 3
    [[ -z $only || $only == *,$name,* ]] || return 0
    if [[ $name != suite && $name != scaling && -e $result ]]; then
        echo "$name: kept"
    elif [[ $(seconds_left) -lt $needs ]]; then
        echo "$name: left for the next run, it takes about $needs s"
        missing+=("$name")
    else
        local start=$SECONDS bounded=(timeout "$(seconds_left)")
        [[ $(type -t "$1") != function ]] || bounded=() # those keep to the limit themselves
        if "${bounded[@]}" "$@" >"$folder/$name.log" 2>&1; then
            echo "$name: done in $((SECONDS - start)) s"
        else
            echo "$name: failed, see $folder/$name.log: $(tail -n 1 "$folder/$name.log")"
            [[ $name == suite || $name == scaling || ! -e $result ]] || mv -f "$result" "$result.failed"
            missing+=("$name")
        fi
    fi
}

# The suite itself takes up what is missing, and says in its last line whether anything is left.
suite() {
    local name=$1
    shift
    local options=(--results "$folder" --append --time-limit "$(($(seconds_left) - 15))" --repeats "$repeats")
    options+=(${commit[@]+"${commit[@]}"})
    # Configurations and repeats side by side, each on a GPU of its own; what runs on several GPUs has them to itself.
    [[ $name != suite || $gpus -eq 1 ]] || options+=(--gpus "$(seq -s , 0 $((gpus - 1)))")
    step "$name" 60 suite.json "$python" "$scripts/benchmark_suite.py" "${options[@]}" "$@"
    if grep -q "processes were not run" "$folder/$name.log" 2>/dev/null && [[ ! " ${missing[*]} " == *" $name "* ]]; then
        echo "$name: $(tail -n 1 "$folder/$name.log")"
        missing+=("$name")
    fi
}

# A trace of every process, and how much of its communication is hidden.
communication() {
    timeout "$(seconds_left)" "${torchrun[@]}" "$scripts/../version3_triton/tiny_llama_v3.py" --preset medium --use-amp \
        --graph --num-steps 10 --enable-pytorch-profiler --profile-dir "$folder/communication_traces" &&
        "$python" "$scripts/analyze_communication.py" "$folder/communication_traces" --json "$folder/communication.json"
}

wrappers() {
    "$scripts/maintain/try_wrappers.sh" --time-limit "$(seconds_left)" --output-dir "$folder/tried_wrappers" \
        >"$folder/wrappers.txt"
}

on_one_gpu=(kernels report ablation2 ablation3 stages wrappers)

# One of the steps above; its result is the file that step is told.
run_on_one_gpu() {
    local left
    left=$(seconds_left)
    case $1 in
        kernels)
            step kernels 120 kernels.json "$python" "$scripts/maintain/benchmark_kernels.py" \
                --json "$folder/kernels.json"
            ;;
        report)
            step report 400 report/report.html "$python" "$scripts/compare_versions.py" --report "$folder/report" \
                --preset medium --seq-lengths 128,256,512,1024 --time-limit "$left"
            ;;
        ablation*)
            step "$1" 400 "$1.json" "$python" "$scripts/fusion_ablation_study.py" --version "${1#ablation}" \
                --preset small --rounds 1 --json "$folder/$1.json" --time-limit "$left"
            ;;
        stages)
            step stages 300 stages/comparison.txt \
                "$scripts/../version3_triton/exercises/performance_debugging/run_all_stages.sh" \
                --output-dir "$folder/stages"
            ;;
        wrappers) step wrappers 300 wrappers.txt wrappers ;;
    esac
}

# Every so many-th of them, one after the other on one GPU; leaves the names of what is missing in a file.
run_lane() {
    local lane=$1 name=CUDA_VISIBLE_DEVICES devices i
    [[ -z ${HIP_VISIBLE_DEVICES-} ]] || name=HIP_VISIBLE_DEVICES
    IFS=, read -ra devices <<<"${!name-$(seq -s , 0 $((gpus - 1)))}"
    export "$name=${devices[lane]}"
    echo "what GPU $lane was to do" >"$folder/lane$lane.missing" # unless it comes to the end
    missing=()
    for ((i = lane; i < ${#on_one_gpu[@]}; i += gpus)); do
        run_on_one_gpu "${on_one_gpu[i]}"
    done
    printf '%s\n' ${missing[@]+"${missing[@]}"} | sed '/^$/d' >"$folder/lane$lane.missing"
}

grid=(--presets "small,medium" --metrics "throughput,memory,accuracy")
suite suite "${grid[@]}" --precisions float32,tf32,bfloat16 \
    --models v1,v1+nodet,v2,v2+compile,v3,v4,hf-compile-graph,hf-graph --graph default
suite suite "${grid[@]}" --precisions float32,bfloat16 --models v1+nodet,v2,v2+compile,v3,v4 --graph on,off
if [[ $gpus -gt 1 ]]; then
    counts=$(for n in 1 2 4 8; do [[ $n -le $gpus ]] && echo "$n"; done | paste -sd, -)
    suite scaling --presets medium --precisions bfloat16 --metrics throughput,memory --models v3,v3+peer-adamw,v4 \
        --nproc "$counts"
    torchrun=("$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus")
    step links 60 links.json "${torchrun[@]}" "$scripts/measure_allreduce.py" --json "$folder/links.json"
    step communication 120 communication.json communication
fi
for ((lane = 0; lane < gpus; lane++)); do
    run_lane "$lane" &
done
wait
mapfile -t -O "${#missing[@]}" missing < <(cat "$folder"/lane*.missing)
rm "$folder"/lane*.missing
step pages 300 pages.json "$python" "$scripts/maintain/try_pages.py" --jobs 4 --time-limit "$(($(seconds_left) - 20))" \
    --output-dir "$folder/tried_pages" --json "$folder/pages.json"

if [[ ${#missing[@]} -gt 0 ]]; then
    echo "not there yet: ${missing[*]}; the same command goes on"
    exit 1
fi
echo "all there: $folder"
