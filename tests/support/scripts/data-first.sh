python tools/preprocess_data.py --input my.json --output-prefix my --workers 8
if [ ! -d ckpt ]; then mkdir -p ckpt; fi
WORLD=16
torchrun --nproc_per_node 8 --nnodes $((WORLD / 8)) pretrain_t5.py \
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 \
  --micro-batch-size 16 --global-batch-size $(( WORLD * 16 )) --num-layers 12
