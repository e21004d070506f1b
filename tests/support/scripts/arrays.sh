#!/bin/bash
# Lists in brackets, as in the examples of today's Megatron-LM.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
NODES=2
WORLD=$(($GPUS*$NODES))
LAUNCH=(
    --nproc_per_node $GPUS   # one process for each GPU
    --nnodes $NODES
    --master_port 29511
)
MODEL=(
    --num-layers 32
    --hidden-size 4096 # it's wide
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
)
TRAIN=(
    --micro-batch-size 2
    --global-batch-size $((WORLD * 8))
    --lr 3.0e-4
    --bf16
)
torchrun "${LAUNCH[@]}" pretrain_gpt.py "${MODEL[@]}" ${TRAIN[@]} \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel
