export NCCL_DEBUG=WARN OMP_NUM_THREADS=8
TP=2
CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONPATH=.:$HOME nohup torchrun --standalone --nproc_per_node=4 \
  pretrain_gpt.py --tensor-model-parallel-size=$TP --micro-batch-size=$((TP*2)) \
  --global-batch-size=32 > train.log 2>&1
