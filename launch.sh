#!/usr/bin/env bash
# Installs, starts and tests Tandem; works from any folder. Paths inside a config are relative to this file's folder.
#
#   bash launch.sh [run] [config.yaml] [key=value …]   install what is missing, then train; default: the quick start
#   bash launch.sh run config.yaml --hosts HOSTFILE [key=value …]   the same over several hosts: docs/hosts.md
#   bash launch.sh slurm config.yaml --nodes N [--gpus-per-node G] [key=value …]   writes a batch script for Slurm
#   bash launch.sh plan [config.yaml] [key=value …]    every number that follows from a config, before anything starts
#   bash launch.sh eval CHECKPOINT [DATA] [key=value …]   pass@k, maj@k, format and length of a model, without a trainer
#   bash launch.sh check config.yaml [completions.jsonl] [key=value …]   try the rewards before any GPU time is spent
#   bash launch.sh setup | test [pytest arguments] | doctor [--imports] [--config FILE] | bench [--cells … --rows …]
#   bash launch.sh report RUN_FOLDER | samples RUN_FOLDER [--step N] [--worst | --best]
#   bash launch.sh push RUN_FOLDER owner/name [--checkpoint step_N] [--private] [--dry-run]   to the Hugging Face hub
#   bash launch.sh gpu-check [--cpu] [--only PART,…]   minutes, offline, that say what this GPU does: docs/gpu.md
#
# Read from the environment: PYTHON (3.11 or 3.12), BACKEND=auto|cpu|gpu, ANY_DRIVER=1, and everything that pip, Hugging
# Face, CUDA, OpenMP and vLLM read themselves. Nothing that you have set is overwritten.
set -euo pipefail

called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$PWD
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

oldest_driver=580  # NVIDIA's, for CUDA 13
oldest_gpu=75      # compute capability 7.5: CUDA 13 has no code for older ones

check_machine() { # check_machine <backend> <python>: everything that would fail only after the download
  local need_gb=6 need_mb=5000 free_kb memory_kb
  [[ $1 == cpu ]] || { need_gb=14 need_mb=7000; }
  free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
  ((free_kb > need_gb * 1000000)) || die "needs $need_gb GB of free disk in $root and there are $((free_kb / 1000000)); free some"
  memory_kb=$(awk '/^MemTotal:/ { print $2 }' /proc/meminfo 2>/dev/null || echo 0)
  ((memory_kb == 0 || memory_kb > need_mb * 1000)) ||
    die "needs $((need_mb / 1000)) GB of memory and there are $((memory_kb / 1000000)); use a larger machine"
  if [[ $1 == cpu ]]; then
    command -v g++ >/dev/null || die "DeepSpeed compiles a small CPU helper: apt-get install g++"
  else
    check_gpu "$2"
  fi
}

check_gpu() { # check_gpu <python>: driver, GPU, and what Triton compiles its launchers with
  local driver capability name cuda
  IFS=, read -r driver capability name < <(
    nvidia-smi --query-gpu=driver_version,compute_cap,name --format=csv,noheader 2>/dev/null
  ) || true # no driver: an image is being built, or BACKEND=gpu was given for another machine
  if [[ ${driver%%.*} =~ ^[0-9]+$ && ${ANY_DRIVER:-} != 1 ]]; then
    cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p') || true
    ((${driver%%.*} >= oldest_driver)) || die "NVIDIA driver $driver${cuda:+ (CUDA $cuda)} is too old: PyTorch and vLLM of" \
      "these versions are built for CUDA 13 alone, which needs driver $oldest_driver or newer. Update it (on the host, for" \
      "a container or a vGPU): apt-get install nvidia-driver-$oldest_driver, or BACKEND=cpu bash launch.sh. With NVIDIA's" \
      "cuda-compat-13-0 on a data-centre GPU: ANY_DRIVER=1 bash launch.sh"
    capability=${capability//[^0-9]/}
    [[ ! $capability =~ ^[0-9]+$ ]] || ((capability >= oldest_gpu)) ||
      die "GPU${name} has compute capability ${capability%?}.${capability: -1} and CUDA 13 needs 7.5 or newer" \
        "(T4, RTX 20 and later); use another GPU, or BACKEND=cpu bash launch.sh"
  fi
  command -v "${CC:-gcc}" >/dev/null || command -v clang >/dev/null ||
    die "Triton compiles its launchers with gcc or clang: apt-get install gcc"
  "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    die "Triton compiles against Python.h, which $1 lacks: apt-get install $("$1" -c 'import sys
print("python%d.%d-dev" % sys.version_info[:2])'), or PYTHON= of an interpreter that has its headers (uv, conda, pyenv do)"
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
from trainer.engine.build_locks import remove_stale_build_locks
remove_stale_build_locks()
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()'
}

setup() {
  local backend python begun=$SECONDS
  backend=$(pick_backend)
  if is_installed "$backend"; then return; fi
  mkdir -p .cache
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
  check_machine "$backend" "$python"
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

from_here() { # from_here <word …>: sets words; what is named from the caller's folder keeps its meaning
  local word
  words=()
  for word; do
    [[ $word == [/-]* || $word == *=* || ! -e $called_from/$word ]] || word=$called_from/$word
    words+=("$word")
  done
}

export TANDEM_CALLED_FROM=$called_from # for messages: a path that is not here may be there
export PATH="$root/.venv/bin:$PATH" # ninja, for compiled ops
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$root/.venv/torch_extensions}
export VLLM_NO_USAGE_STATS=${VLLM_NO_USAGE_STATS-1} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM-false}

command=run
case ${1:-} in
  run | plan | check | eval | setup | test | doctor | bench) command=$1; shift ;;
  report | samples | push | gpu-check | slurm) command=$1; shift ;;
  -h | --help | help) sed -n '2,16s/^# \{0,1\}//p' launch.sh; exit ;;
esac

case $command in
  setup)
    setup
    echo "tandem: ready; start with: bash launch.sh"
    ;;
  run | plan | slurm)
    setup
    # A config named from the caller's folder keeps its meaning.
    if [[ ${1:-} == [!/]* && $1 != *=* && -f $called_from/$1 ]]; then set -- "$called_from/$1" "${@:2}"; fi
    exec .venv/bin/python -m "launcher.$command" "$@"
    ;;
  eval)
    setup
    from_here "$@"
    exec .venv/bin/python -m launcher.evaluation.main ${words[@]+"${words[@]}"}
    ;;
  test)
    setup
    workers=(-n auto --dist loadfile --no-loadscope-reorder) # in which order: tests/conftest.py; a later -n N wins
    for word; do # a few tests that are named start sooner without workers
      case $word in -k* | --pdb | tests/*) workers=() ;; esac
    done
    exec .venv/bin/python -m pytest ${workers[@]+"${workers[@]}"} "$@"
    ;;
  bench)
    setup
    exec .venv/bin/python tools/benchmarks/bench.py "$@"
    ;;
  report | samples | push)
    setup
    if [[ ${1:-} == [!/]* && -d $called_from/$1 ]]; then set -- "$called_from/$1" "${@:2}"; fi
    module=report.samples
    [[ $command != report ]] || module=report.main
    [[ $command != push ]] || module=launcher.push
    exec .venv/bin/python -m "$module" "$@"
    ;;
  check)
    setup
    from_here "$@"
    exec .venv/bin/python -m launcher.check_rewards ${words[@]+"${words[@]}"}
    ;;
  gpu-check)
    setup
    exec .venv/bin/python -m gpu_check "$@"
    ;;
  doctor)
    if supported .venv/bin/python; then python=.venv/bin/python; else python=$(find_python); fi
    from_here "$@"
    exec "$python" -m launcher.doctor ${words[@]+"${words[@]}"}
    ;;
esac
