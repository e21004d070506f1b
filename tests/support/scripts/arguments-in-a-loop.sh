TP=2
MBS=4
while [[ $# -gt 0 ]]; do
  case $1 in
    --tp) TP=$2; shift 2 ;;
    --mbs) MBS="$2"; shift; shift ;;
    *) echo "unknown $1"; exit 1 ;;
  esac
done
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --tensor-model-parallel-size $TP \
  --micro-batch-size $MBS --global-batch-size 64
