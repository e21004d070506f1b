export GPU_MAX_HW_QUEUES=${GPU_MAX_HW_QUEUES:-2}
for ARGUMENT in "$@"
do
   KEY=$(echo $ARGUMENT | cut -f1 -d=)
   VALUE="${ARGUMENT:${#KEY}+1}"
   export "$KEY"="$VALUE"
done
TP="${TP:-8}"
PP="${PP:-1}"
MBS="${MBS:-2}"
SEQ_PARALLEL="${SEQ_PARALLEL:-1}"
FP8="${FP8:-0}"
FSDP="${FSDP:-0}"
NO_TRAINING="${NO_TRAINING:-0}"
EVAL_ITERS="${EVAL_ITERS:-'-1'}"
if [ "$FSDP" -eq 1 ] && [ "$TP" -gt 1 ]; then
    TP=1
fi
ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --micro-batch-size $MBS \
    --global-batch-size $((MBS * 16)) \
    --eval-iters $EVAL_ITERS \
"
if [ -z ${DATA_PATH+x} ]; then
    ARGS="$ARGS --mock-data"
else
    ARGS="$ARGS --data-path $DATA_PATH"
fi
if [ "$FP8" -eq 1 ]; then
    ARGS="$ARGS --fp8-format=hybrid"
fi
if [ "$SEQ_PARALLEL" -eq 1 ]; then
    ARGS="$ARGS --sequence-parallel"
fi
LOGGING=""
if [ -n "$WANDB_API_KEY" ]; then LOGGING="--wandb-project x"; fi
run_cmd="
    torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \
        $ARGS \
        $LOGGING
"
run_cmd="$run_cmd |& tee log.txt"
if [ "$NO_TRAINING" -eq 0 ]; then
    eval $run_cmd
fi
