MOE_ARGS=(
    --num-experts 8
    --expert-model-parallel-size 8
    --moe-router-load-balancing-type aux_loss
    --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 8
    --sequence-parallel
    --use-distributed-optimizer
)
LOGGING_ARGS=(--log-interval 1)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGGING_ARGS+=(--wandb-project ${WANDB_PROJECT:-"Mixtral"})
fi
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py ${MOE_ARGS[@]} \
  --micro-batch-size 1 --global-batch-size 256 --bf16 ${MODEL_PARALLEL_ARGS[@]} ${LOGGING_ARGS[@]}
