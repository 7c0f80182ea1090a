#!/usr/bin/env bash
# Find or make the Python environment for this checkout. Meant to be sourced; run by itself it only does the set-up.
#
# An active environment (virtualenv, conda, or the python on PATH) that satisfies the requirements is used as it is and
# nothing is installed into it. Otherwise a virtual environment is made at $MMSPECTRAL_VENV (default: .venv in the
# checkout) with the versions of tools/constraints*.txt.
#
# MMSPECTRAL_STACK=openmmlab asks for the original OpenMMLab packages, onedl for the maintained forks. Unset, an active
# environment may have either, and one that is made has the forks. The environment of the original packages lies
# at $MMSPECTRAL_VENV-openmmlab and shares the unpacked torch with $MMSPECTRAL_VENV by hard links where it can.
#
# Leaves: MMSPECTRAL_PYTHON (the interpreter), MMSPECTRAL_SETUP_SECONDS, PATH with its folder first, and PYTHONPATH with
# the checkout first. Returns non-zero, with a message, when there is no such environment and none could be made.

mmspectral_say() { printf '[set-up %4ss] %s\n' "$((SECONDS - mmspectral_started))" "$*" >&2; }

mmspectral_active_python() {
    local candidate="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
    candidate="${candidate:+$candidate/bin/python}"
    [[ -n "$candidate" ]] || candidate="$(command -v python || command -v python3)" || return
    "$candidate" -c 'import sys; sys.version_info >= (3, 10) or sys.exit(1); print(sys.executable)' 2>/dev/null
}

# The newest interpreters have no wheels yet for some of the pinned releases; pip would compile them.
mmspectral_base_python() {
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "No Python 3.10 to 3.13 is on PATH; install one (Debian: apt-get install python3 python3-venv)." >&2
    return 1
}

# pip without the settings that would let onedl-mmcv's build see a torch and compile its operators (16 minutes on two
# cores), or that would install outside the virtual environment.
mmspectral_pip() {
    local verbosity=()
    [[ -t 2 ]] || verbosity=(--quiet)
    env -u PYTHONPATH -u PIP_NO_BUILD_ISOLATION -u PIP_USER -u PIP_TARGET -u PIP_PREFIX \
        "$1/bin/python" -m pip install --disable-pip-version-check "${verbosity[@]}" "${@:2}" >&2
}

mmspectral_editable_is_here() (
    cd / && env -u PYTHONPATH "$1/bin/python" -c \
        'import importlib.util as u, sys; sys.exit(u.find_spec("mmspectral").origin != sys.argv[1])' \
        "$2/mmspectral/__init__.py" 2>/dev/null
)

mmspectral_create_venv() {
    local venv="$1" python
    if [[ -e "$venv/.mmspectral-unfinished" ]]; then
        mmspectral_say "an earlier set-up of $venv was interrupted; making it again (pip keeps its downloads)"
    elif "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    elif [[ -e "$venv" && ! -e "$venv/pyvenv.cfg" ]] && ! rmdir "$venv" 2>/dev/null; then
        echo "$venv is not empty and not a virtual environment; set MMSPECTRAL_VENV to another folder." >&2
        return 1
    fi
    python="$(mmspectral_base_python)" || return
    mmspectral_say "making a virtual environment at $venv with $python"
    rm -rf "$venv" && mkdir -p "$venv" && : >"$venv/.mmspectral-unfinished" || return
    if ! "$python" -m venv "$venv" >&2; then
        echo "$python cannot make virtual environments (Debian: apt-get install python3-venv)." >&2
        return 1
    fi
}

# pip replaces files and never writes into them, so a change of one environment leaves the other's links as they are.
mmspectral_share_torch() (
    shopt -s nullglob
    site="$(cd "$2" && echo lib/python3*/site-packages)"
    [[ -e "$1/.mmspectral-stamp" && ! -e "$2/$site/torch" ]] || return 0
    mmspectral_say "sharing the unpacked torch with $1"
    cp -al "$1/$site"/{torch,functorch,triton,nvidia,cuda}* "$2/$site/" 2>/dev/null ||
        rm -rf "$2/$site"/{torch,functorch,triton,nvidia,cuda}*
)

mmspectral_fill_venv() {
    local venv="$1" root="$2" stack="$4" constraints headless
    constraints=(-c "$root/tools/constraints.txt" -c "$root/tools/constraints-$stack.txt")
    # Not for a user's environment seen the first time: an interruption must not make the next run remove that.
    [[ ! -e "$venv/.mmspectral-stamp" ]] || mv "$venv/.mmspectral-stamp" "$venv/.mmspectral-unfinished" || return
    headless="$(grep '^opencv-python-headless==' "$root/tools/constraints.txt")"
    if [[ "$stack" == onedl ]]; then
        # Before torch is there, so that no setting makes it compile; not from pip's cache, which may hold a compiled
        # one.
        mmspectral_say "installing onedl-mmcv without its compiled operators"
        mmspectral_pip "$venv" "${constraints[@]}" --no-deps --no-cache-dir setuptools onedl-mmcv || return
    else
        mmspectral_share_torch "${venv%"-$stack"}" "$venv"
    fi
    mmspectral_say "installing torch, OpenMMLab and the test tools (about 6 GB on disk; minutes on a fresh machine)"
    mmspectral_pip "$venv" "${constraints[@]}" --use-pep517 -e "$root[$stack,tests]" || return
    # opencv-python needs the system's libGL, which servers lack. Both builds write cv2/: the last one installed counts.
    mmspectral_say "putting the headless build of opencv last"
    mmspectral_pip "$venv" --no-deps --force-reinstall "$headless" || return
    mmspectral_say "letting torchvision stand in for mmcv's compiled operators"
    (cd / && env -u PYTHONPATH "$venv/bin/python" -m mmspectral.compat install) >&2 || return
    "$venv/bin/python" "$root/tools/check_env.py" --versions-only --tests --family "$stack" >&2 || return
    printf '%s\n' "$3" >"$venv/.mmspectral-unfinished" && mv "$venv/.mmspectral-unfinished" "$venv/.mmspectral-stamp"
}

mmspectral_prepare_venv() {
    local venv="$1" root="$2" stack="$3" stamp
    stamp="$(cd "$root" &&
        cat setup.py tools/{constraints.txt,"constraints-$stack.txt",setup_env.sh} mmspectral/compat/environment.py |
        cksum)"
    mkdir -p "$(dirname "$venv")" || return
    # The lock is a file beside the environment, which may be removed and made again while it is held.
    if command -v flock >/dev/null; then
        exec {mmspectral_lock}>"$venv.lock" || return
        if ! flock -n "$mmspectral_lock"; then
            mmspectral_say "waiting for another set-up of $venv"
            flock "$mmspectral_lock"
        fi
    fi
    if ! "$venv/bin/python" -c '' 2>/dev/null || [[ "$(cat "$venv/.mmspectral-stamp" 2>/dev/null)" != "$stamp" ]]; then
        mmspectral_create_venv "$venv" && mmspectral_fill_venv "$venv" "$root" "$stamp" "$stack"
    elif ! mmspectral_editable_is_here "$venv" "$root"; then
        mmspectral_say "pointing $venv at this checkout"
        mmspectral_pip "$venv" --no-deps --no-build-isolation --use-pep517 -e "$root"
    fi
}

mmspectral_setup() {
    local mmspectral_started=$SECONDS stack="${MMSPECTRAL_STACK:-}" root venv python
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
    venv="${MMSPECTRAL_VENV:-$root/.venv}"
    [[ "$venv" == /* ]] || venv="$PWD/$venv"
    case "$stack" in
        "" | onedl) ;;
        openmmlab) venv+="-openmmlab" ;;
        *) echo "MMSPECTRAL_STACK is '$stack'; it must be onedl or openmmlab." >&2 && return 1 ;;
    esac
    python="$(mmspectral_active_python)" || python=""
    if [[ -n "$python" && ! "$(dirname "$python")" -ef "$venv/bin" ]] &&
        "$python" "$root/tools/check_env.py" --versions-only ${stack:+--family "$stack"} >/dev/null; then
        mmspectral_say "using the active environment as it is: $python"
    else
        mmspectral_say "using $venv (for what an active environment lacks, run tools/check_env.py in it)"
        python="$venv/bin/python"
        # In a subshell: the lock goes with it.
        if ! (mmspectral_prepare_venv "$venv" "$root" "${stack:-onedl}"); then
            echo "The set-up of $venv did not finish. Start the same command again once the cause above is resolved." >&2
            return 1
        fi
    fi
    # mmengine resolves 'mmspectral::' configs through these; an environment used as it is has no install to make them.
    if [[ ! -e "$root/mmspectral/.mim/model-index.yml" ]]; then
        mkdir -p "$root/mmspectral/.mim" &&
            ln -sfn ../../configs ../../tools ../../configs/model-index.yml "$root/mmspectral/.mim/" || return
    fi
    mmspectral_say "ready: $python"
    export MMSPECTRAL_PYTHON="$python"
    export MMSPECTRAL_SETUP_SECONDS="$((SECONDS - mmspectral_started))"
    export PATH="$(dirname "$python"):$PATH"
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
}

mmspectral_setup
