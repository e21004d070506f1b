TP=4
cat > run.sh <<EOF
#!/bin/bash
python pretrain_gpt.py --tensor-model-parallel-size $TP \\
  --pipeline-model-parallel-size 2 --micro-batch-size \${1:-3} --global-batch-size 48
EOF
bash run.sh
