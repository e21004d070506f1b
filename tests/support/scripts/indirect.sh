TP_7B=2
TP_70B=8
MODEL=70B
key="TP_${MODEL}"
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
  --tensor-model-parallel-size ${!key} --micro-batch-size 1 --global-batch-size 32 --fp8-format hybrid --bf16
