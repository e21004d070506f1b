srun --mpi=pmix python3 -u -m megatron.pretrain --tensor-model-parallel-size 4 \
  --context-parallel-size 2 --micro-batch-size 1 --global-batch-size 8
