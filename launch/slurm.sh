#!/usr/bin/env bash
# Several machines under Slurm: one `accelerate launch` on each, which starts one process for each of its GPUs.
# Submit it from this repository's folder, which every machine must see under the same path, as the recipe's files:
#   sbatch --nodes 4 --gpus-per-node 8 launch/slurm.sh zero3 RECIPE.yaml --set schedule.steps=500
# The first argument is a file of bf16_to_fp16/launch/accelerate without .yaml; what follows the recipe goes to `finetune`.
#SBATCH --job-name=bf16-to-fp16
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
set -euo pipefail

if (($# < 2)); then
  echo "error: give a kind and a recipe: launch/slurm.sh ddp|zero2|zero3|zero2-offload|zero3-offload|fsdp RECIPE.yaml [options of finetune]" >&2
  exit 2
fi
config=bf16_to_fp16/launch/accelerate/$1.yaml
shift
if [[ ! -f $config ]]; then
  echo "error: no $config here; submit from the repository's folder, and name a file of bf16_to_fp16/launch/accelerate" >&2
  exit 2
fi
[[ ! -d .venv/bin ]] || export PATH="$PWD/.venv/bin:$PATH"

gpus=${SLURM_GPUS_ON_NODE:-1}
# The first machine is the meeting point; a port of the job's own, so that two jobs on a machine do not meet.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
# Planning and the audit at the end run on the CPU, where accelerate would leave them one thread.
threads=$((${SLURM_CPUS_ON_NODE:-1} / gpus))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# SLURM_NODEID differs from machine to machine, so the inner shell reads it.
# shellcheck disable=SC2016
exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
  exec accelerate launch --config_file "$1" --num_machines "$2" --num_processes "$3" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$4" --main_process_port "$5" -m bf16_to_fp16 finetune "${@:6}"
' launch "$config" "$SLURM_NNODES" "$((SLURM_NNODES * gpus))" "$head" "$port" "$@"
