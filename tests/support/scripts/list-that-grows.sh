ARGS=(--micro-batch-size 1)
ARGS+=(--global-batch-size 256)
ARGS+=(--sequence-parallel)
PARALLEL=(
  "--tensor-model-parallel-size" "4"
  --pipeline-model-parallel-size=2
)
ARGS+=("${PARALLEL[@]}")
ARGS+=(--bf16)
DIST="--nproc_per_node 8 --nnodes 1"
torchrun $DIST train.py "${ARGS[@]}" &
wait
