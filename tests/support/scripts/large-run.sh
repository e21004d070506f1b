#!/bin/bash
#SBATCH --nodes=24
set -x -e
TP_SIZE=4
PP_SIZE=12
config_json="./ds_config.$SLURM_JOBID.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": 2,
  "train_batch_size": 2048,
  "zero_optimization": {"stage": 1},
  "bf16": {"enabled": true},
  "steps_per_print": 2000
}
EOT
export LAUNCHER="python -u -m torch.distributed.launch \
    --nproc_per_node 8 \
    --nnodes 24 \
    "
export CMD=" \
    `pwd`/pretrain_gpt.py \
    --tensor-model-parallel-size $TP_SIZE \
    --pipeline-model-parallel-size $PP_SIZE \
    --rampup-batch-size 192 16 9_765_625 \
    --micro-batch-size 2 --global-batch-size 2048 \
    --bf16 --checkpoint-activations \
    --deepspeed --deepspeed_config ${config_json} --zero-stage 1 \
    --deepspeed-activation-checkpointing \
    "
echo $CMD
srun --jobid=$SLURM_JOBID bash -c '$LAUNCHER --node_rank 0 $CMD' 2>&1 | tee -a main_log.txt
echo "END TIME: $(date)"
