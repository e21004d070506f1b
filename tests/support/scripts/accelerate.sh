ACC="accelerate launch --num_processes 8 --num_machines 1"
$ACC train_megatron.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
  --micro-batch-size 2 --global-batch-size 32
