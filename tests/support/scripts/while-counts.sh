i=0
LIST=""
while [ $i -lt 4 ]; do
  LIST="$LIST $i"
  i=$((i+1))
done
torchrun --nproc_per_node $i --nnodes 1 pretrain_gpt.py --data-path $LIST \
  --tensor-model-parallel-size $i --micro-batch-size 2 --global-batch-size 8
