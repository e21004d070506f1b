CHECKPOINT_PATH=$1 #<where>
DATA_PATH="${2}_text_document"
if [ $# -gt 5 ]; then
  echo too many
  exit 1
fi
DATA="--data-path $DATA_PATH --save ${CHECKPOINT_PATH:-ckpt} --split 949,50,1"
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py $DATA \
  --tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 16 "$@"
