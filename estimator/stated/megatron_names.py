"""Megatron-LM's arguments that a plan does not read, by the reason for it.

The names are from ``megatron/training/arguments.py`` of releases 0.9 to 0.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def _names(text: str) -> frozenset[str]:
    return frozenset(f"--{name}" for name in text.split())


MODEL: Final = _names("""
    encoder-num-layers decoder-num-layers hidden-size ffn-hidden-size kv-channels
    group-query-attention num-query-groups max-position-embeddings position-embedding-type
    use-rotary-position-embeddings rotary-base rotary-percent rotary-interleaved
    rotary-seq-len-interpolation-factor use-rope-scaling rope-scaling-factor rope-type
    no-rope-freq no-position-embedding relative-attention-num-buckets
    relative-attention-max-distance make-vocab-size-divisible-by normalization norm-epsilon
    apply-layernorm-1p apply-residual-connection-post-layernorm openai-gelu squared-relu swiglu
    quick-geglu untie-embeddings-and-output-weights disable-bias-linear add-qkv-bias qk-layernorm
    qk-l2-norm attention-dropout hidden-dropout attention-backend use-flash-attn
    encoder-seq-length decoder-seq-length vocab-size padded-vocab-size vocab-extra-ids
    bert-no-binary-head attention-head-type enable-shared-expert num-shared-experts q-lora-rank
    kv-lora-rank qk-head-dim qk-pos-emb-head-dim qk-nope-head-dim qk-rope-head-dim v-head-dim
    rotary-scaling-factor moe-layer-freq moe-ffn-hidden-size moe-shared-expert-intermediate-size
    moe-router-topk moe-expert-capacity-factor moe-pad-expert-input-to-capacity
    moe-token-drop-policy window-size window-attn-skip-freq softmax-type num-classes img-h img-w
    num-channels patch-dim optimizer use-precision-aware-optimizer main-grads-dtype
    main-params-dtype exp-avg-dtype exp-avg-sq-dtype accumulate-allreduce-grads-in-fp32
    grad-reduce-in-bf16

""")
"""The model and its optimizer, which other options of the command describe."""

_TRAINING: Final = _names("""
    weight-decay start-weight-decay end-weight-decay weight-decay-incr-style clip-grad adam-beta1
    adam-beta2 adam-eps sgd-momentum muon-momentum muon-no-split-qkv muon-use-nesterov
    muon-scale-mode muon-fp32-matmul-prec muon-num-ns-steps muon-tp-mode muon-extra-scale-factor
    lr lr-decay-style lr-wsd-decay-style lr-decay-iters lr-decay-samples lr-wsd-decay-samples
    lr-wsd-decay-iters lr-warmup-fraction lr-warmup-iters lr-warmup-samples lr-warmup-init warmup
    min-lr decoupled-lr decoupled-min-lr override-opt-param-scheduler
    use-checkpoint-opt-param-scheduler head-lr-mult
    train-iters train-samples exit-interval exit-duration-in-mins exit-signal-handler skip-train
    iterations-to-skip calculate-per-token-loss
    seed data-parallel-random-init init-method-std embedding-init-method-std
    init-method-xavier-uniform use-cpu-initialization init-model-with-meta-device
    no-initialization
    loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
    apply-query-key-layer-scaling attention-softmax-in-fp32 no-query-key-layer-scaling
    check-for-spiky-loss check-for-large-grads no-check-for-nan-in-loss-and-grad
    check-for-nan-in-loss-and-grad rerun-mode error-injection-rate error-injection-type
    result-rejected-tracker-filename deterministic-mode
    eval-iters eval-interval full-validation multiple-validation-sets test-mode
    moe-router-load-balancing-type moe-router-dtype moe-router-score-function
    moe-router-pre-softmax moe-router-num-groups moe-router-group-topk
    moe-router-topk-scaling-factor moe-router-enable-expert-bias moe-router-bias-update-rate
    moe-router-force-load-balancing moe-aux-loss-coeff moe-z-loss-coeff moe-input-jitter-eps
    moe-use-upcycling moe-upcycling-granularity mtp-loss-scaling-factor
""")

_DATA_AND_FILES: Final = _names("""
    data-path split train-data-path valid-data-path test-data-path data-args-path
    per-split-data-args-path data-cache-path no-mmap-bin-files mock-data sample-rate mask-prob
    short-seq-prob num-workers reset-position-ids reset-attention-mask eod-mask-loss
    no-create-attention-mask-in-dataloader num-dataset-builder-threads object-storage-cache-path
    mid-level-dataset-surplus allow-ambiguous-pad-tokens dataloader-type retriever-seq-length
    vocab-file merge-file tokenizer-type tokenizer-model tokenizer-metadata tiktoken-pattern
    tiktoken-num-special-tokens tiktoken-special-tokens legacy-tokenizer trust-remote-code
    save save-interval persistent-save-interval save-retain-interval no-save-optim no-save-rng load
    no-load-optim no-load-rng load-main-params-from-ckpt no-strict-fsdp-dtensor-load
    non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
    non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo finetune pretrained-checkpoint
    ckpt-step exit-on-missing-checkpoint no-use-tokenizer-model-from-checkpoint-args use-dist-ckpt
    use-persistent-ckpt-worker auto-detect-ckpt-format dist-ckpt-format ckpt-format
    ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format
    ckpt-fully-parallel-save no-ckpt-fully-parallel-save async-save ckpt-fully-parallel-load
    ckpt-assume-constant-structure dist-ckpt-strictness dist-ckpt-save-pre-mcore-014
    dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient replication
    replication-jump replication-factor disable-msc adlr-autoresume adlr-autoresume-interval
""")

_LOGS: Final = _names("""
    log-params-norm log-num-zeros-in-grad log-throughput log-progress log-energy log-interval
    timing-log-level no-barrier-with-level-1-timing timing-log-option tensorboard-dir
    tensorboard-log-interval tensorboard-queue-size log-timers-to-tensorboard
    no-log-loss-scale-to-tensorboard log-loss-scale-to-tensorboard
    log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard
    log-learning-rate-to-tensorboard log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard
    no-log-learning-rate-to-tensorboard wandb-project wandb-entity wandb-exp-name wandb-save-dir
    logging-level log-straggler disable-straggler-on-startup straggler-ctrlr-port
    straggler-minmax-count run-workload-inspector-server enable-one-logger no-one-logger
    one-logger-project one-logger-run-name one-logger-async app-tag-run-name app-tag-run-version
    config-logger-dir profile profile-step-start profile-step-end profile-ranks
    use-pytorch-profiler record-memory-history memory-snapshot-path moe-per-layer-logging
    check-weight-hash-across-dp-replicas-interval dump-param-to-param-group-map
    enable-ft-package calc-ft-timeouts inprocess-restart
""")

_DEEPSPEED_AND_OLD: Final = _names("""
    DDP-impl use-contiguous-buffers-in-local-ddp no-contiguous-buffers-in-local-ddp data-impl
    mmap-warmup override-lr-scheduler use-checkpoint-lr-scheduler
    scaled-upper-triang-masked-softmax-fusion scaled-masked-softmax-fusion bias-gelu-fusion
    bias-dropout-fusion fp32-allreduce fp32-tokentypes layernorm-epsilon deepspeed-mpi deepscale
    deepscale-config deepspeed-activation-checkpointing ds-pipeline-enabled
    contigious-checkpointing synchronize-each-layer profile-backward zero-contigious-gradients
    zero-reduce-bucket-size zero-allgather-bucket-size zero-reduce-scatter remote-device
    use-pin-memory repeated-dataloader train-tokens lr-decay-tokens lr-warmup-tokens
    return-data-index data-efficiency-curriculum-learning train-idx-path train-doc-idx-path
    train-sample-idx-path train-shuffle-idx-path train-desc-path train-weighted-split-paths
    train-weighted-split-paths-path mlp-type topk expert-interval moe-train-capacity-factor
    moe-eval-capacity-factor moe-min-capacity moe-loss-coeff create-moe-param-group
    disable-moe-token-dropping use-tutel ds-inference inference eval-batch-size
    universal-checkpoint verify-checkpoint verify-checkpoint-model-type no-bf16-accumulate
    cpu-torch-adam use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton
    use-flash-attn-builder no-scaled-masked-softmax-fusion tokenizer-name-or-path tokenizer-path
    pad-vocab-size-to kill-switch-path codecarbon-dir abort-on-unmet-fused-kernel-constraints
    embed-layernorm log-optimizer-states-to-tensorboard no-save-rng aml-data-download-path
    extra-vocab-size max-padding-length patch-tokenizer-type dataset train-mode use-legacy-models
    bert-load ict-load biencoder-projection-dim ict-head-size titles-data-path query-in-block-prob
    use-one-sent-docs block-data-path embedding-path indexer-batch-size indexer-log-interval

""")
"""Arguments of Megatron-DeepSpeed, of old releases and of forks on which no plan depends."""

_KERNELS_AND_OVERLAP: Final = _names("""
    transformer-impl te-rng-tracker inference-rng-tracker use-mcore-models use-legacy-models spec
    no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion
    no-rope-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl no-persist-layer-norm
    no-gradient-accumulation-fusion use-te-activation-func use-fused-weighted-squared-relu
    fp16-lm-cross-entropy disable-bf16-reduced-precision-matmul no-gradient-reduce-div-fusion
    tp-comm-overlap tp-comm-overlap-cfg disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
    tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
    disable-tp-comm-split-ag disable-tp-comm-split-rs tp-comm-bootstrap-backend
    no-async-tensor-model-parallel-allreduce no-overlap-p2p-communication
    overlap-p2p-communication overlap-p2p-communication-warmup-flush overlap-grad-reduce
    overlap-param-gather overlap-param-gather-with-optimizer-step no-align-grad-reduce
    no-align-param-gather delay-grad-reduce delay-param-gather defer-embedding-wgrad-compute
    wgrad-deferral-limit ddp-num-buckets ddp-bucket-size ddp-pad-buckets-for-high-nccl-busbw
    ddp-reduce-scatter-with-fp32-accumulation ddp-average-in-collective
    no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p use-nccl-ub
    disable-symmetric-registration use-sharp sharp-enabled-group fsdp-double-buffer
    suggested-communication-unit-size keep-fp8-transpose-cache nccl-communicator-config-path
    high-priority-stream-groups pipeline-model-parallel-comm-backend empty-unused-memory-level
    manual-gc manual-gc-interval no-manual-gc-eval train-sync-interval enable-cuda-graph
    cuda-graph-scope cuda-graph-impl external-cuda-graph cuda-graph-warmup-steps
    disable-gloo-process-groups
    no-clone-scatter-output-in-embedding use-torch-optimizer-for-cpu-offload
    overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params
    fp8-margin fp8-interval fp8-amax-history-len fp8-amax-compute-algo fp8-recipe no-fp8-wgrad
    fp8-param-gather reuse-grad-buf-for-mxfp8-param-ag moe-router-padding-for-fp8
    moe-grouped-gemm moe-use-legacy-grouped-gemm moe-permute-fusion moe-router-fusion
    moe-apply-probs-on-input moe-token-dispatcher-type moe-enable-deepep moe-deepep-num-sms
    moe-shared-expert-overlap overlap-moe-expert-parallel-comm delay-wgrad-compute
    moe-pad-experts-for-cuda-graph-inference enable-experimental
""")
"""Choices of kernels and of their overlap, which neither a plan nor its price distinguishes."""

_LAUNCHER: Final = _names("""
    nproc-per-node nnodes node-rank hostfile num-nodes num-gpus include exclude no-local-rank
    num-processes num-machines machine-rank main-process-ip main-process-port no-ssh force-multi
    launcher launcher-args ssh-port deepspeed-config deepspeed enable-each-rank-log config-file
    dynamo-backend mixed-precision gpu-ids multi-gpu use-deepspeed deepspeed-hostfile
    deepspeed-multinode-launcher save-pid master-addr master-port rdzv-id rdzv-backend
    rdzv-endpoint rdzv-conf standalone max-restarts monitor-interval start-method role module
    no-python run-path log-dir redirects tee local-addr local-ranks-filter use-env
    distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init
    local-rank lazy-mpu-init

""")

IGNORED: Final = (
    _TRAINING | _DATA_AND_FILES | _LOGS | _DEEPSPEED_AND_OLD | _KERNELS_AND_OVERLAP | _LAUNCHER
)

_FIRST_AND_LAST: Final = (
    "state --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers instead, or give"
    " the plan as JSON"
)
REFUSED: Final[Mapping[str, str]] = {
    "--pipeline-model-parallel-layout": f"is not read; {_FIRST_AND_LAST}",
    "--num-layers-per-stage": f"is not read; {_FIRST_AND_LAST}",
    "--pipeline-model-parallel-split-rank": f"is not read; {_FIRST_AND_LAST}",
    "--encoder-tensor-model-parallel-size": "cannot be expressed: an encoder has its part of the"
    " stages; give the plan as JSON",
    "--encoder-pipeline-model-parallel-size": "cannot be expressed: an encoder has its part of the"
    " stages; give the plan as JSON",
    "--distribute-saved-activations": "cannot be expressed: a plan keeps the inputs of layers whole;"
    " use --sequence-parallel",
    "--cpu-offloading": "keeps activations in the host's memory, which a plan cannot express; remove it",
    "--cpu-offloading-num-layers": "keeps activations in the host's memory, which a plan cannot"
    " express; remove it",
    "--fine-grained-activation-offloading": "keeps activations in the host's memory, which a plan"
    " cannot express; remove it",
    "--moe-layer-recompute": "recomputes experts alone, but a plan recomputes attention or whole layers;"
    " state --recompute-granularity full",
    "--moe-extended-tp": "is an old argument; state --expert-tensor-parallel-size",
    "--fp4-format": "cannot be expressed: the precisions of a plan are f32, bf16, f16 and fp8",
    "--enable-full-sharding-in-hsdp": "cannot be expressed: a plan divides states among all replicas",
    "--use-tp-pp-dp-mapping": "cannot be expressed: replicas of a stage are neighbours in a plan",
    "--hierarchical-context-parallel-sizes": "cannot be expressed: a context group of a plan is one"
    " ring; state --cp-comm-type p2p",
    "--partition-activations": "divides kept activations among tensor groups, which a plan cannot"
    " express; remove it",
    "--checkpoint-in-cpu": "keeps activations in the host's memory, which a plan cannot express; remove"
    " it",
    "--compression-training": "changes the model during training; remove it",
    "--use-checkpoint-args": "takes arguments from a checkpoint; state them in the file",
    "--use-mp-args-from-checkpoint-args": "takes the degrees from a checkpoint; state them in the file",
    "--yaml-cfg": "names another file; give that file as the plan",
    "--heterogeneous-layers-config-path": "describes unlike layers; describe the model with"
    " --architecture",
    "--perform-rl-step": "alternates training with inference, which a plan cannot express; remove it",
}
"""Arguments that change how a model is divided in a way that a plan cannot express."""

NOT_PRICED: Final[Mapping[str, str]] = {
    "--rampup-batch-size": "the batch grows to --global-batch-size, which alone is priced",
    "--decrease-batch-size-if-needed": "the batch may be smaller than the one that is priced",
    "--memory-centric-tiled-linear": "products are divided in time",
    "--random-ltd": "tokens are left out during training",
    "--curriculum-learning-legacy": "sequences are shorter at first",
    "--curriculum-learning": "sequences are shorter at first",
    "--mtp-num-layers": "layers are added for later tokens",
    "--first-last-layers-bf16": "some layers have another precision",
    "--num-layers-at-start-in-bf16": "some layers have another precision",
    "--num-layers-at-end-in-bf16": "some layers have another precision",
    "--fp32-residual-connection": "activations between layers have 32 bits",
    "--multi-latent-attention": "attention is of another kind than that of models here",
}
"""Arguments that change the cost of training in a way that is reported, but not priced."""

OFF: Final[Mapping[str, frozenset[str]]] = {
    "--cpu-offloading-num-layers": frozenset({"0"}),
    "--encoder-tensor-model-parallel-size": frozenset({"0"}),
    "--encoder-pipeline-model-parallel-size": frozenset({"0"}),
    "--mtp-num-layers": frozenset({"0"}),
    "--pipeline-model-parallel-split-rank": frozenset({"0"}),
}
"""Values with which an argument that is refused or not priced changes nothing. A flag may also be false."""
