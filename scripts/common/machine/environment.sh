# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and others. Makes the workshop's Python environment and leaves its interpreter in $PYTHON:
#   use_environment run     what the four scripts need (the dependencies of pyproject.toml)
#   use_environment room    and what check_room.sh needs
#   use_environment test    and what the test suite needs
#   use_environment all     and what only its slow tests need
# A PyTorch that the current python3 has, from a site's module for instance, is used as it is. Otherwise pip installs the
# versions of constraints.txt from where pip is configured to take them (PIP_INDEX_URL, PIP_FIND_LINKS, ...), on an
# NVIDIA GPU those of constraints-nvidia.txt, with which scripts/recorded was measured. From PyTorch's own index comes the
# build for the machine's ROCm release on an AMD GPU, and for CUDA 12 where an NVIDIA GPU or its driver needs that. Settings:
#   TINY_LLAMA_VENV=FOLDER     where the environment is made (default: .venv in the repository)
#   TINY_LLAMA_PYTHON=PYTHON   the interpreter to start from (default: python3)
#   TINY_LLAMA_CPU=1           do without this machine's GPU
#   TINY_LLAMA_SET=oldest      install the oldest supported versions instead, in .venv-oldest
#   TINY_LLAMA_ROCM=6.4        install the PyTorch build for this ROCm release, not for the one that is found; also
#                              without a GPU, as on a cluster's login node
#   TINY_LLAMA_TORCH_INDEX=URL a mirror of PyTorch's index (default: https://download.pytorch.org/whl)

# With a CDPATH cd may print the folder too.
ROOT=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../../.." && pwd -P)
SET=${TINY_LLAMA_SET:-pinned}
case $SET in
    pinned) CONSTRAINTS=$ROOT/scripts/common/machine/constraints.txt VENV=${TINY_LLAMA_VENV:-$ROOT/.venv} ;;
    oldest) CONSTRAINTS=$ROOT/scripts/common/machine/constraints-oldest.txt VENV=${TINY_LLAMA_VENV:-$ROOT/.venv-oldest} ;;
    *) echo "TINY_LLAMA_SET is pinned or oldest, not $SET" >&2 && exit 2 ;;
esac
[[ $VENV == /* ]] || VENV=$PWD/$VENV
PYTHON=$VENV/bin/python
MARK=$VENV/made-by-tiny-llama # nothing is written into a folder that has files, but not this one
PROBE=$ROOT/scripts/common/machine/environment.py
TORCH_INDEX=${TINY_LLAMA_TORCH_INDEX:-https://download.pytorch.org/whl}

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

usage() { sed -n -e '1d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "$0"; } # the first comment of the script that was started

quoted() { # WORDS...: a command that can be pasted, from a folder with a space too
    local line
    printf -v line ' %q' "$@"
    printf '%s\n' "${line# }"
}

gpu_kind() {
    if [ "${TINY_LLAMA_CPU:-0}" != 1 ]; then
        ! nvidia-smi -L 2>/dev/null | grep '^GPU' >/dev/null || { echo nvidia && return; }
        [ -z "${TINY_LLAMA_ROCM:-}" ] || { echo amd && return; } # also on a cluster's login node, which has no GPU
        ! { [ -e /dev/kfd ] || rocminfo 2>/dev/null | grep 'Device Type: *GPU' >/dev/null; } || { echo amd && return; }
    fi
    echo none
}

blamed() { # COMMAND...: print the setting of the environment without which the command works; fail if there is none
    local name
    for name in PYTHONPATH PYTHONHOME LD_LIBRARY_PATH; do
        [ -z "${!name:-}" ] || ! env -u "$name" "$@" >/dev/null 2>&1 || { printf '%s\n' "$name=${!name}" && return; }
    done
    return 1
}

base_python() { # the interpreter to start from; where our own environment is activated, the one that it was made from
    local python recorded=''
    python=$(command -v "${TINY_LLAMA_PYTHON:-python3}") || fail "There is no ${TINY_LLAMA_PYTHON:-python3} here:" \
        "install Python 3.10 or newer, or name one, as in TINY_LLAMA_PYTHON=python3.12."
    if [[ $python == "$VENV"/* ]]; then
        [ ! -s "$MARK" ] || read -r _ recorded <"$MARK"
        python=${recorded:-$("$python" -c 'import sys; print(sys._base_executable)')}
    fi
    printf '%s\n' "$python"
}

usable() { # KIND PYTHON: print the folder of a PyTorch that serves this kind of GPU; fail where there is none
    local build folder
    read -r build folder < <("$2" "$PROBE" torch 2>/dev/null) || return 1
    [[ $1:$build =~ ^(amd:rocm|nvidia:cuda|none:.+)$ ]] && printf '%s\n' "$folder"
}

not_ours() { [ ! -e "$MARK" ] && [ -n "$(ls -A "$VENV" 2>/dev/null)" ]; }

leave_alone() { # WHY
    local cause
    ! cause=$(blamed "$PYTHON" "$PROBE" summary) || fail "$PYTHON works, but not with $cause: unset it."
    fail "$VENV $1 and was not made by this script: remove it, or set TINY_LLAMA_VENV to another folder."
}

wait_for_others() { # PYTHON: let one call at a time make environments beside $VENV, until it closes descriptor 9
    # The lock is on the folder above, which no call replaces, and is gone as soon as its holder is. Python takes it,
    # because macOS has no flock command. Without locks in the file system, a call goes on as if it were alone.
    local folder
    folder=$(dirname "$VENV")
    { mkdir -p "$folder" && exec 9<"$folder"; } 2>/dev/null || return 0
    "$1" -c '
import fcntl, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.stderr.write(f"Another call is making a Python environment in {sys.argv[1]}: waiting until it ends\n")
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass' "$folder" || return 0 # prepare says what is wrong with this Python
}

forget_cut_packages() { # let pip install those anew whose installation was cut: it writes INSTALLER last
    local package
    for package in "$VENV"/lib/python3*/site-packages/*.dist-info; do
        [ ! -d "$package" ] || [ -e "$package/INSTALLER" ] || rm -rf -- "$package"
    done
}

make_venv() { # KIND PYTHON [OPTION...]
    "$2" -c 'import venv, ensurepip' 2>/dev/null || fail "$2 cannot make virtual environments:" \
        "install its venv module (Debian, Ubuntu: apt install python3-venv)."
    { mkdir -p "$VENV" && : >"$MARK"; } 2>/dev/null || fail "Cannot write $VENV: set TINY_LLAMA_VENV to a folder that can" \
        "be written, as in TINY_LLAMA_VENV=~/tiny_llama_venv."
    # The mark stays, so that a call that is interrupted here leaves a folder that is ours.
    find "$VENV/" -mindepth 1 -maxdepth 1 ! -name "${MARK##*/}" -exec rm -rf -- {} +
    say "Making the Python environment in $VENV"
    "$2" -m venv "${@:3}" "$VENV" >&2 || fail "$2 could not make a virtual environment: its message is above."
    echo "$1 $2" >"$MARK"
}

install_torch() { # KIND PYTHON RELEASE VERSION FOLDER: install a build of PyTorch from PyTorch's own index
    local built install
    built=${5/rocm/ROCm } built=${built/cu12/CUDA 12.}
    make_venv "$1" "$2"
    say "$3: installing PyTorch $4 built for $built, gigabytes, from $TORCH_INDEX/$5"
    install=(-m pip install "torch==$4+$5" --index-url "$TORCH_INDEX/$5")
    PIP_USER=0 "$PYTHON" "${install[@]}" --disable-pip-version-check --no-input --retries 2 >&2 ||
        fail "pip could not install PyTorch $4 for $3: its message is above. Load your site's PyTorch" \
            "module, set TINY_LLAMA_TORCH_INDEX to a mirror, or run this where there is a network:" \
            "$(quoted "$PYTHON" "${install[@]}")"
}

install_rocm_torch() { # PYTHON: install the PyTorch built for this machine's ROCm
    local release version folder named
    read -r release version folder < <("$1" "$PROBE" rocm)
    named="TINY_LLAMA_ROCM=${folder#rocm} ./scripts/quickstart.sh"
    [ "$release" != - ] || fail "This machine has an AMD GPU, but no ROCm release was found (no .info/version below" \
        "ROCM_PATH or /opt/rocm, no amd-smi): load your site's PyTorch or ROCm module, or name the release of your" \
        "driver, as in $named"
    [ "$version" != unknown ] || fail "PyTorch's build for ROCm $release is unknown to this script (its table:" \
        "scripts/common/machine/environment_rocm.txt): load your site's PyTorch module or a ROCm from 6.2 on, try the newest build," \
        "which brings its own ROCm, with $named, use a container image that holds PyTorch, such as AMD's" \
        "rocm/pytorch, or set TINY_LLAMA_CPU=1 to run on the CPU."
    install_torch amd "$1" "ROCm $release" "$version" "$folder"
}

install_cuda_torch() { # PYTHON CUDA VERSION FOLDER: install a PyTorch for CUDA 12
    [ "$4" != - ] || fail "The NVIDIA driver of this machine is for CUDA $2, and PyTorch $3 needs CUDA 12: update the driver" \
        "to 525 or newer, load your site's PyTorch module, or set TINY_LLAMA_CPU=1 to run on the CPU."
    install_torch nvidia "$1" "driver for CUDA $2" "$3" "$4"
}

install_unmet() { # KIND GROUP
    local unmet
    read -ra unmet <<<"$("$PYTHON" "$PROBE" unmet "$2" "$1")"
    [ ${#unmet[@]} -gt 0 ] || return 0
    ! not_ours || leave_alone "lacks ${unmet[*]}"
    # Not grep -q, here and above: it ends before the other program, which then fails of the pipe.
    if [[ $1 == none && " ${unmet[*]} " == *" torch "* ]] &&
        ! "$PYTHON" -m pip config list 2>/dev/null | grep -E '(index-url|find-links|no-index)=' >/dev/null; then
        say "Taking PyTorch from pip's default index, whose Linux build brings its CUDA libraries (gigabytes);" \
            "for a small one, stop this, and first:" \
            "$(quoted "$PYTHON" -m pip install torch -c "$CONSTRAINTS" --index-url "$TORCH_INDEX/cpu")"
    fi
    say "Installing ${unmet[*]}"
    PIP_USER=0 "$PYTHON" -m pip install --constraint "$CONSTRAINTS" --disable-pip-version-check --no-input "${unmet[@]}" >&2 ||
        pip_failed "${unmet[*]}"
}

pip_failed() { # PACKAGES
    "$PYTHON" -m pip config list >/dev/null 2>&1 || fail "pip's configuration is damaged: its message above names the file;" \
        "repair it, or set PIP_CONFIG_FILE=/dev/null."
    fail "pip could not install $1: its message is above (without a network, set PIP_INDEX_URL or PIP_FIND_LINKS to" \
        "packages that you can reach)."
}

prepare() { # KIND PYTHON: an environment with pip, and with a re-used PyTorch where there is one
    local folder cuda
    [ ! -e "$MARK" ] || forget_cut_packages
    if usable "$1" "$PYTHON" >/dev/null; then
        [[ -z ${TINY_LLAMA_PYTHON:-} || "$(cat "$MARK" 2>/dev/null)" == *" $2" ]] ||
            say "$VENV was not made from $2, but is used: remove it, and the next call makes it from that Python."
        return 0
    fi
    ! not_ours || leave_alone "has no PyTorch that fits"
    "$2" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$2 is older than Python 3.10: name a newer one, as in TINY_LLAMA_PYTHON=python3.12."
    if [ "$SET" = pinned ] && folder=$(usable "$1" "$2"); then
        say "Using the PyTorch of $2, in $folder"
        make_venv "$1" "$2" --system-site-packages
        # Where the current python3 is that of a virtual environment, this option does not reach its packages.
        [ "$(usable none "$PYTHON")" = "$folder" ] || echo "$folder" >"$("$PYTHON" -c \
            'import sysconfig; print(sysconfig.get_path("purelib"))')/current_python.pth"
    elif [ "$1" = amd ]; then
        install_rocm_torch "$2"
    elif [ "$1 $SET" = "nvidia pinned" ] && cuda=$("$2" "$PROBE" cuda); then
        # shellcheck disable=SC2086 # three words
        install_cuda_torch "$2" $cuda
    elif [ "$(cat "$MARK" 2>/dev/null)" != "$1 $2" ] || ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        make_venv "$1" "$2"
    fi
}

is_current() { [[ -x $PYTHON && "$(cat "$1" 2>/dev/null)" == "$2" ]]; } # STAMP KEY

use_environment() {
    local group=$1 stamp=$VENV/$1.stamp kind base key versions unseen cause settings
    [ "${TINY_LLAMA_CPU:-0}" != 1 ] || export CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1
    kind=$(gpu_kind)
    [ "$kind $SET" != "nvidia pinned" ] || CONSTRAINTS=$ROOT/scripts/common/machine/constraints-nvidia.txt
    base=$(base_python) || exit 1
    settings="${PYTHONPATH:-} ${PYTHONHOME:-} ${LD_LIBRARY_PATH:-}"
    key="$kind $SET $base $settings $(cat "$ROOT/pyproject.toml" "$ROOT"/scripts/common/machine/{constraints,environment}* | cksum)"
    ! is_current "$stamp" "$key" || return 0
    if ! "$base" -c '' 2>/dev/null; then
        ! cause=$(blamed "$base" -c '') || fail "$base does not start with $cause: unset it."
        fail "$base does not start: $("$base" -c '' 2>&1 | sed -n 1p)"
    fi
    # pip ends of Ctrl-C as of a fault, and a shell goes on after that.
    trap 'say "Interrupted: the next call completes the environment in $VENV." && exit 130' INT
    wait_for_others "$base"
    if ! is_current "$stamp" "$key"; then
        prepare "$kind" "$base"
        install_unmet "$kind" "$group"
        versions=$("$PYTHON" "$PROBE" summary) || {
            ! cause=$(blamed "$PYTHON" "$PROBE" summary) ||
                fail "The environment in $VENV works, but not with $cause, see the message above: unset it."
            fail "The environment in $VENV does not work: its message is above; remove the folder and try again."
        }
        if [ "$kind" = nvidia ] && ! usable nvidia "$PYTHON" >/dev/null; then
            say "pip's settings gave a PyTorch without CUDA: the NVIDIA GPU of this machine will not be used."
        elif [ "$kind" != none ]; then
            unseen=$("$PYTHON" "$PROBE" unseen)
            [ -z "$unseen" ] || say "PyTorch sees no GPU here, and everything will run on the CPU: $unseen"
        fi
        say "Python environment in $VENV: $versions"
        not_ours || printf '%s\n' "$key" >"$stamp"
    fi
    exec 9<&-
    trap - INT
}
