#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=8
DIR=`pwd`
DATE=`date +'%y-%m-%d'`
OPTIONS="--tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size 4 \
    --micro-batch-size 1 --global-batch-size 128 \
    --fp16 --tensorboard-dir ${DIR}/tb-${DATE}"
run_cmd="python -u ${DIR}/pretrain_gpt.py ${OPTIONS}"
srun -l --output=log.txt sh -c "${run_cmd}"
