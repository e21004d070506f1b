COMMON="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2"
for seed in 1 2 3; do
  torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py $COMMON --seed $seed
done
