TP=2;PP=2;MBS=1
cd /tmp && true; [ "$TP" == "2" ] || exit 1
GBS=16; torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --micro-batch-size $MBS --global-batch-size $GBS || echo failed
