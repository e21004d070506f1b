args='--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2'
args+=' --micro_batch_size 2'
args="$args --global_batch_size 32 --use_distributed_optimizer"
exec torchrun --nproc-per-node 8 --nnodes 1 train_gpt.py $args
