SIZES=" \
    --num-layers 24 \
    --micro-batch-size 4 \
    --global-batch-size 256 "
PARALLEL="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
RUN=" \
    pretrain_gpt.py \
    $PARALLEL \
    --split 98,1,1 \
    $SIZES \
    "
torchrun --nproc_per_node 8 --nnodes 4 $RUN
