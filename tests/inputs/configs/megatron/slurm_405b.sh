#!/bin/bash
#SBATCH --nodes=1024
#SBATCH --gpus-per-node=8
# The shape of a large Slurm job.
NNODES=1024
GPUS_PER_NODE=8
OPTIONS="--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 \
 --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 \
 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --context-parallel-size 1 \
 --micro-batch-size 1 --global-batch-size 1024 --bf16 --sequence-parallel --tp-comm-overlap \
 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --swiglu --exit-interval 10"
run_cmd="python -u pretrain_gpt.py ${OPTIONS}"
srun --nproc-per-node=$GPUS_PER_NODE --nnodes=$NNODES sh -c "${run_cmd}"
