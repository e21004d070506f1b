GPT_ARGS="
  --num-layers 24
  --micro-batch-size 4
"
# GPT_ARGS="--micro-batch-size 64"
TP=2 # TP=8
#TP=16
OUTPUT="--log-interval 10" # --tensor-model-parallel-size 64
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py $GPT_ARGS $OUTPUT \
  --tensor-model-parallel-size $TP `# the width` --global-batch-size 64
