#!/usr/bin/env bash
# Installs, starts and tests Tandem; works from any folder. Paths inside a config are relative to this file's folder.
#
#   bash launch.sh [run] [config.yaml] [key=value …]   install what is missing, then train; default: the quick start
#   bash launch.sh run config.yaml --hosts HOSTFILE [key=value …]   the same over several hosts: docs/hosts.md
#   bash launch.sh slurm config.yaml --nodes=N --gpus-per-node=G [key=value …]   a batch script for Slurm: docs/hosts.md
#   bash launch.sh plan [config.yaml] [key=value …]    every number that follows from a config, before anything starts
#   bash launch.sh eval CHECKPOINT [DATA] [key=value …]   pass@k, maj@n, format and length of a model, without a trainer
#   bash launch.sh check config.yaml [key=value …]   try the rewards before any GPU time is spent
#   bash launch.sh convert FILE.gguf FOLDER [--dtype float32]   a model folder from a GGUF file
#   bash launch.sh report RUN_FOLDER | samples RUN_FOLDER [--step N] [--worst | --best]
#   bash launch.sh setup | doctor | bench [--cells … --rows …]
#   bash launch.sh families [NAME …] [--only …]   what works with which model: docs/model.md
#   bash launch.sh test [--all] [pytest arguments]     --all: the full counts, layouts and stories, too
#   bash launch.sh gpu-check [--cpu]   minutes, offline, that say what this GPU does: docs/gpu.md
#
# Read from the environment: PYTHON (3.11 or 3.12), BACKEND=auto|cpu|gpu, ANY_DRIVER=1, and everything that pip, Hugging
# Face, CUDA, OpenMP and vLLM read themselves. Nothing that you have set is overwritten.
set -euo pipefail

called_from=$PWD
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")") # one name, by whatever link it is called
unset PYTHONSAFEPATH # by which Python would not find what is here
venv=$root/.venv
if [[ -n ${TANDEM_PYTHON:-} ]]; then venv=${TANDEM_PYTHON%/bin/*}; else cd "$root"; fi # it is of tandem/start.py
stamp=.venv/.tandem-stamp
log=.cache/setup.log
pytorch_cpu_index=https://download.pytorch.org/whl/cpu

die() { printf 'tandem: %s\n' "$*" >&2; exit 2; }

step() { # step <what> <command …>: runs the command with its output in the setup log
  local what=$1 begun=$SECONDS
  shift
  printf 'tandem: %s … ' "$what"
  printf '\n### %s\n' "$what" >>"$log"
  if "$@" >>"$log" 2>&1; then
    printf '%d s\n' $((SECONDS - begun))
  else
    printf 'failed\n'
    tail -n 15 "$log" | sed 's/^/    /' >&2
    die "setup stopped at: $what. The whole log: $root/$log"
  fi
}

supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

find_python() { # 3.11 first: the CPU lock is tested with it
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
    if supported "$candidate"; then command -v "$candidate"; return; fi
    [[ $candidate != "${PYTHON:-}" ]] || die "PYTHON=$PYTHON is not Python 3.11 or 3.12; unset it, or name one that is"
  done
  die "needs Python 3.11 or 3.12: apt-get install python3.11 python3.11-venv, or PYTHON=/path/to/python3.11 bash launch.sh"
}

pick_backend() {
  case ${BACKEND:-auto} in
    cpu | gpu) echo "$BACKEND" ;;
    auto) if nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi ;;
    *) die "BACKEND=$BACKEND is not auto, cpu or gpu" ;;
  esac
}

fingerprint() { # fingerprint <backend>: of everything that an installation depends on
  { cat requirements.txt tools/locks/cpu.lock tools/locks/gpu.lock; .venv/bin/python -VV; echo "$1 $root"; } | sha256sum
}

is_installed() { [[ -x .venv/bin/python && -e $stamp && $(<"$stamp") == "$(fingerprint "$1")" ]]; }

is_usable() { # made here (a copied folder keeps old paths in its scripts), runs, and is not of the other backend
  grep -qsF "$root/.venv" .venv/bin/activate && supported .venv/bin/python && [[ -x .venv/bin/pip ]] || return 1
  local torch built_for
  for torch in .venv/lib/python3.*/site-packages/torch-[0-9]*.dist-info; do
    built_for=gpu
    [[ $torch != *+cpu.dist-info ]] || built_for=cpu
    [[ ! -d $torch || $built_for == "$1" ]] || return 1
  done
}

pip_install() { .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off "$@"; }

install_torch_cpu() { # your own index first; the PyTorch one serves this single package and is not asked for any other
  pip_install --no-deps "$(grep '^torch==' tools/locks/cpu.lock)" ||
    pip_install --no-deps "$(grep '^torch==' tools/locks/cpu.lock)" --index-url "$pytorch_cpu_index"
}

drop_half_installed() { # RECORD is the last file that pip writes; without it pip would still take a package for whole
  local info
  for info in .venv/lib/python3.*/site-packages/*.dist-info; do
    if [[ -d $info && ! -e $info/RECORD ]]; then rm -rf "$info"; fi
  done
}

build_cpu_op() { # otherwise the first rank compiles it, while the sampler waits
  .venv/bin/python -c '
from trainer.engine.build_locks import guard_ops
guard_ops()
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()'
}

setup() {
  local backend python begun=$SECONDS
  backend=$(pick_backend)
  if is_installed "$backend"; then return; fi
  mkdir -p .cache 2>/dev/null && [[ -w .cache ]] || die "$root is not installed, or not with a Python that this user" \
    "may start, and cannot be written; its owner first: PYTHON=/usr/bin/python3.11 bash launch.sh setup"
  exec 9>.cache/setup.lock
  if ! flock -n 9; then # a second launch.sh waits until the first has installed everything
    printf 'tandem: waiting for another launch.sh, which installs into %s/.venv (log: %s)\n' "$root" "$log"
    flock 9
  fi
  if is_installed "$backend"; then exec 9>&-; return; fi
  if [[ -L .venv ]] && ! is_usable "$backend"; then # clearing would go through the link and empty another folder's
    die "$root/.venv is a link to $(readlink -f .venv), made elsewhere; remove it: rm $root/.venv"
  fi
  if is_usable "$backend"; then python=.venv/bin/python; else python=$(find_python); fi
  "$python" -m launcher.doctor --before-install "$backend" || exit 2 # all that would fail only after the download
  : >"$log"
  rm -f "$stamp"
  printf 'tandem: installing for %s into %s/.venv (log: %s)\n' "$backend" "$root" "$log"
  if ! is_usable "$backend"; then
    step "virtual environment ($("$python" -V))" "$python" -m venv --clear .venv
  fi
  drop_half_installed
  if [[ $backend == cpu ]]; then
    step "torch" install_torch_cpu
    step "vLLM, DeepSpeed and the rest" pip_install --no-deps -r tools/locks/cpu.lock
    step "compiling DeepSpeed's CPU op" build_cpu_op
  else
    step "torch, vLLM, DeepSpeed and the rest" pip_install -r requirements.txt -c tools/locks/gpu.lock
  fi
  step "first import" .venv/bin/python -c 'import torch, vllm, deepspeed'
  fingerprint "$backend" >"$stamp" # last: without it the next start goes through all of this again
  exec 9>&-
  printf 'tandem: installed in %d s\n' $((SECONDS - begun))
}

export TANDEM_CALLED_FROM=$called_from # what is named from there keeps its meaning
export PATH="$venv/bin:$PATH" # ninja, for compiled ops
export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS-1} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM-false}

case $root in # PATH, ninja and the shell's lines in its files; everything else they take
  *[:\"\\\$\`]* | *$'\n'*) die "this folder is $root, and compilers and PATH take no : \" \\ \$ \` in a path; rename it" ;;
esac
if [[ ! -w ${HOME:-~} ]]; then # as in a container whose user has no name: caches need a place
  scratch=${TMPDIR:-/tmp}/tandem-$UID
  mkdir -p -m 700 "$scratch" 2>/dev/null && [[ -O $scratch && -w $scratch && ! -L $scratch ]] ||
    die "neither your home nor $scratch can be written; export HOME=/a/folder/of/yours"
  [[ ! -d ${HOME:-}/.cache/huggingface ]] || export HF_HOME=${HF_HOME:-$HOME/.cache/huggingface}
  [[ ${HOME:-/} != / ]] || export HOME=$scratch
  export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$scratch/.cache}
  export XDG_CONFIG_HOME=${XDG_CONFIG_HOME:-$scratch/.config} TRITON_HOME=${TRITON_HOME:-$scratch}
fi
export HOME=${HOME:-~} USER=${USER:-${LOGNAME:-uid$UID}} # torch asks for both
ops=$venv/torch_extensions
if [[ -z ${TORCH_EXTENSIONS_DIR:-} && -d $venv ]] && ! { mkdir -p "$ops" && [[ -w $ops ]]; } 2>/dev/null; then
  ops=${XDG_CACHE_HOME:-$HOME/.cache}/tandem/${root//\//_} # the installation is not ours to write
  mkdir -p "$ops" && cp -rpn "$venv"/torch_extensions/. "$ops" 2>/dev/null || true
fi

case ${1:-} in
  -h | --help | help) sed -n '/^#!/d; /^set/q; s/^# \{0,1\}//p' "$root/launch.sh"; exit ;;
esac
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$ops}
[[ -z ${TANDEM_PYTHON:-} ]] || exec "$TANDEM_PYTHON" -P -m launcher "$@" # which installs nothing
if supported .venv/bin/python; then python=.venv/bin/python; else python=$(find_python); fi
"$python" -m launcher --known "$@" || exit # before anything is installed
if [[ ${1:-} != doctor ]]; then
  setup
  python=.venv/bin/python
fi
exec "$python" -m launcher "$@"
