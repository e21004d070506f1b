for size in 7b; do
  name=llama-$size
  torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \
    --tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 64 \
    --save ckpt/${name} --load ckpt/${name%-*} --bf16
done
