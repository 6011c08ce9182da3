#!/bin/bash
# From the keys of llm-jp/Megatron-LM scripts/gcp/Llama-2-175B/llama-2-175b.sh
#SBATCH --job-name=llama-2-175b
#SBATCH --nodes 64
#SBATCH --gpus-per-node=8
set -e
[[ "${SLURM_JOB_NUM_NODES}" -gt 1 ]] && export USE_TCPX=yes || export USE_TCPX=no
export MASTER_ADDR=$(scontrol show hostname $SLURM_JOB_NODELIST | head -n1)
export MASTER_PORT=$((10000 + ($SLURM_JOBID % 50000)))
export NUM_GPU_PER_NODE=8
NUM_NODES=$SLURM_JOB_NUM_NODES
NUM_GPUS=$((${NUM_NODES} * ${NUM_GPU_PER_NODE}))
HIDDEN_SIZE=12288
FFN_HIDDEN_SIZE=38464
NUM_LAYERS=96
NUM_HEADS=96
NUM_QUERY_GROUPS=16
SEQ_LENGTH=4096
TENSOR_PARALLEL_SIZE=4
PIPELINE_PARALLEL_SIZE=16
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=1728
TRAIN_DATA_PATH=""
TRAIN_DATA_PATH="${TRAIN_DATA_PATH} 14486363187 ${DATASET_DIR}/train/code/stack_0000.jsonl_text_document"
mpirun -np $NUM_GPUS --npernode $NUM_GPU_PER_NODE \
  python pretrain_gpt.py \
  --tensor-model-parallel-size ${TENSOR_PARALLEL_SIZE} \
  --pipeline-model-parallel-size ${PIPELINE_PARALLEL_SIZE} \
  --sequence-parallel \
  --use-distributed-optimizer \
  --num-layers ${NUM_LAYERS} \
  --hidden-size ${HIDDEN_SIZE} \
  --ffn-hidden-size ${FFN_HIDDEN_SIZE} \
  --num-attention-heads ${NUM_HEADS} \
  --group-query-attention --num-query-groups ${NUM_QUERY_GROUPS} \
  --seq-length ${SEQ_LENGTH} \
  --micro-batch-size ${MICRO_BATCH_SIZE} \
  --global-batch-size ${GLOBAL_BATCH_SIZE} \
  --train-data-path ${TRAIN_DATA_PATH} \
  --swiglu --bf16
