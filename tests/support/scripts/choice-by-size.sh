SIZE=13B
if [ $SIZE = 7B ]; then
  TP=1; PP=1; LAYERS=32
elif [ $SIZE = 13B ]; then
  TP=2; PP=2; LAYERS=40
elif [[ $SIZE == 70B ]]; then
  TP=8; PP=4; LAYERS=80
else
  echo "unknown size $SIZE"
  exit 1
fi
[ $TP -gt 1 ] && SP="--sequence-parallel"
torchrun --nproc_per_node=8 --nnodes=1 pretrain_gpt.py \
  --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size ${PP} ${SP} \
  --num-layers ${LAYERS} --micro-batch-size 1 --global-batch-size 64 --bf16
