CONFIG=ds.json
ZERO=1
MBS=4
GBS=$(( 8 * MBS * 2 ))
cat <<EOT > $CONFIG
{
  "train_batch_size": $GBS,
  "train_micro_batch_size_per_gpu": $MBS,
  "zero_optimization": {"stage": $ZERO},
  "bf16": {"enabled": true}
}
EOT
ds_args=" --deepspeed"
ds_args=" --deepspeed_config=$CONFIG ${ds_args}"
ds_args=" --zero-stage=$ZERO ${ds_args}"
deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py \
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --no-pipeline-parallel \
  --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 \
  --micro-batch-size $MBS --global-batch-size $GBS --checkpoint-activations \
  --bf16 $ds_args | tee out.log
