NAME='my "run"'
PREFIX="a \"b\" \$HOME"
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --wandb-exp-name "$NAME" --save "$PREFIX/c d" \
  --tensor-model-parallel-size '2' --micro-batch-size "4" --data-path 0.3 'x y' 0.7 z\ z \
  --global-batch-size "6"4
