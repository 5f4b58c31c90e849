# shellcheck shell=bash
# Sourced by train_gpt.sbatch, sweep.sbatch and elastic.sbatch: train on the ranks of the job and, when asked to stop, queue it again.

# Code that `hybridcomp train` exits with when it was asked to stop, and has written a checkpoint.
interrupted=75

# Seconds after which ranks that do not stop are ended: the time limit would end the job for good.
patience=90

asked=""
training=""
hurry=""

# Slurm sends USR1 to this script alone (--signal=B:USR1); srun hands it on to the ranks.
ask() {
  asked=1
  kill -USR1 "$training"
  (sleep "$patience" && kill -TERM "$training") &
  hurry=$!
}

# train_or_requeue RUN_DIRECTORY ARGUMENT...
train_or_requeue() {
  local out=$1 code=0 job=$SLURM_JOB_ID
  shift
  if grep -qs '^{"kind": "summary"' "$out/metrics.jsonl"; then
    echo "$out is done"
    return 0
  fi
  # In the background, because bash handles a signal only between commands, and `wait` is one that it interrupts.
  srun --kill-on-bad-exit=1 --label python -m hybridcomp train --threads "$OMP_NUM_THREADS" --out "$out" "$@" &
  training=$!
  trap ask USR1
  wait "$training" || code=$?
  while [ -n "$asked" ] && kill -0 "$training" 2>/dev/null; do
    code=0
    wait "$training" || code=$?
  done
  if [ -n "$hurry" ]; then kill "$hurry" 2>/dev/null || true; fi
  if [ "$code" -ne "$interrupted" ] && { [ -z "$asked" ] || [ "$code" -eq 0 ]; }; then return "$code"; fi
  echo "asked to stop (code $code): back in the queue, to go on with what is in $out"
  # The number of an array's last task is that of the whole array.
  if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; fi
  scontrol requeue "$job"
}
