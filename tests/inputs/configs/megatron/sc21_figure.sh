#!/bin/bash
# From the keys of NVIDIA/Megatron-LM examples/academic_paper_scripts/sc21/run_figure_18.sh
TP=8
PP=8
MBS=1
GBS=1536
NLS=48
HS=10240
NAH=80
NNODES=8
MEGATRON_EXTRA_PARAMS="--num-layers-per-virtual-pipeline-stage 2 "
OPTIONS=" --tensor-model-parallel-size ${TP} \
          --pipeline-model-parallel-size ${PP} \
          --micro-batch-size ${MBS} \
          --global-batch-size ${GBS} \
          --num-layers ${NLS} \
          --hidden-size ${HS} \
          --num-attention-heads ${NAH} \
          --DDP-impl local \
          --seq-length 2048 \
          --max-position-embeddings 2048 \
          --recompute-granularity full \
          --recompute-method uniform \
          --fp16 \
          ${MEGATRON_EXTRA_PARAMS}"
srun -l --nodes=$NNODES bash -c "python -u pretrain_gpt.py ${OPTIONS}"
