TP=2
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --tensor-model-parallel-size $TP \
  --micro-batch-size 2 --global-batch-size 32
