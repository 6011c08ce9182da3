#!/bin/bash
# From the keys of NVIDIA/Megatron-LM examples/deepseek_v2/train_deepseekv2.sh
GPUS_PER_NODE=8
NUM_NODES=1
TP_SIZE=1
NUM_LAYERS=27
MOE_LAYERS=$(($NUM_LAYERS-1))
DTYPE="bf16"
GPT_ARGS=(
    --num-layers $NUM_LAYERS
    --hidden-size 2048
    --ffn-hidden-size 10944
    --num-attention-heads 16
    --kv-channels 16
    --seq-length 4096
    --max-position-embeddings 4096
    --disable-bias-linear
    --normalization RMSNorm
    --swiglu
)
MLA_ARGS=(--multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 --qk-head-dim 128 --qk-layernorm)
MOE_ARGS=(
    --num-experts 64
    --moe-layer-freq "([0]+[1]*$MOE_LAYERS)"
    --moe-ffn-hidden-size 1408
    --moe-router-topk 6
    --moe-shared-expert-intermediate-size 2816
    --moe-token-dispatcher-type alltoall
    --expert-model-parallel-size 8
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer)
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING_ARGS+=(--fp8-format hybrid)
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py \
    ${GPT_ARGS[@]} ${MLA_ARGS[@]} ${MOE_ARGS[@]} ${TRAINING_ARGS[@]} --tensor-model-parallel-size $TP_SIZE
