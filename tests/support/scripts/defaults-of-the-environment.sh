TP=${TP:-4}
PP=${PP:-"2"}
MBS=${MBS-2}
GBS=${GBS:-$((MBS * 32))}
EXTRA=${EXTRA:-}
NNODES=${SLURM_NNODES:-1}
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py $EXTRA \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
    --micro-batch-size $MBS --global-batch-size $GBS
