#!/usr/bin/env bash
set -euxo pipefail
# Megatron-FSDP with full recomputation of some layers.
N=${NODES:-2}
ARGS="
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 128
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --recompute-granularity full --recompute-method block --recompute-num-layers 4
    --bf16 --no-gradient-accumulation-fusion
    --ckpt-format fsdp_dtensor
"
torchrun --nnodes $N --nproc-per-node 8 pretrain_gpt.py $ARGS
