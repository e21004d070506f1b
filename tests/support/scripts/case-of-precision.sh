PR=bf16
AC=full
case $PR in
  fp16) precision=" --fp16 --initial-loss-scale 65536" ;;
  bf16|mixed) precision=" --bf16" ;;
  *) echo "what is $PR?"; exit 1 ;;
esac
case "$AC" in
  sel*) recompute="--recompute-activations";;
  full)
    recompute=" \
        --recompute-method uniform \
        --recompute-num-layers 1 \
        --recompute-granularity full"
    ;;
  (none) recompute="" ;;
esac
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py $precision $recompute \
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --micro-batch-size 8
