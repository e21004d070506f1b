#!/bin/bash
GPUS_PER_NODE=4
NNODES=16
TP=2
PP=8
export LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --max_restarts 0 --tee 3 \
    "
export CMD=" \
    pretrain_gpt.py \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP \
    --micro-batch-size 2 \
    --global-batch-size 512 \
    --bf16 \
    "
srun --wait=60 bash -c '$LAUNCHER --node_rank 0 $CMD' 2>&1 | tee -a main_log.txt
