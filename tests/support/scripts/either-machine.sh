if command -v nvidia-smi > /dev/null; then MASTER=$(hostname); else MASTER=localhost; fi
if nvidia-smi | grep -q NVLink; then
  EXTRA="--tp-comm-overlap"
else
  EXTRA=""
fi
torchrun --nproc_per_node 8 --nnodes 1 --master_addr $MASTER pretrain_gpt.py $EXTRA \
  --tensor-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 32
