OPTIONS="--tensor-model-parallel-size 8 --micro-batch-size 1 --bf16"
CMD="torchrun --nproc_per_node 8 --nnodes 2 pretrain.py --seed 1 $OPTIONS"
echo $CMD
$CMD
