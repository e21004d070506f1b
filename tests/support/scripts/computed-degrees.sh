NODES=4
GPUS=$((NODES << 3))
TP=$(( 2 ** 2 ))
PP=$(expr 8 / $TP)
DP=$((GPUS / (TP * PP)))
let MBS=1+1
(( GBS = DP * MBS * 4 ))
VP_FLAG=$([ $PP -gt 1 ] && echo "--overlap-p2p-communication")
torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py --tensor-model-parallel-size $TP \
  --pipeline-model-parallel-size $PP --micro-batch-size $MBS --global-batch-size $GBS
