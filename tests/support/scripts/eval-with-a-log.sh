set -euo pipefail
OUT=./logs
options="--micro-batch-size 2 \
  --tensor-model-parallel-size 2 \
  --pipeline-model-parallel-size 1 \
  --use-distributed-optimizer"
run="torchrun --nproc_per_node 4 --nnodes 1 pretrain_llama.py ${options}"
run="$run 2>&1 | cat > $OUT.txt"
echo ${run}
eval ${run}
