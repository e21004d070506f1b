usage() { echo "usage: $0"; exit 1; }
launch() {
  local tp=$1 pp=$2
  shift 2
  torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
    --tensor-model-parallel-size $tp --pipeline-model-parallel-size "$pp" "$@"
}
function log { echo "[$(date)] $*"; }
log "starting torchrun train.py"
launch 2 4 --micro-batch-size 4 --global-batch-size 128 --bf16
