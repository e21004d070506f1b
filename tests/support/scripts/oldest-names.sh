python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt2.py \
  --model-parallel-size 4 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
  --batch-size 8 --seq-length 1024 --checkpoint-activations --fp16
