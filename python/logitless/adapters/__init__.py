"""Signatures of the frameworks people already use, each in a module of its own. None is imported unless asked for.

    transformers    fuse_lm_head(model): a fused head for a causal language model
    trl             chunked_logprob, and use_in_trl(): TRL's trainers score tokens with it
    megatron        linear_cross_entropy and vocab_parallel_cross_entropy of Megatron-Core
    verl            linear_cross_entropy of verl
    deepspeed       vocab_parallel_cross_entropy and vocab_parallel_linear_cross_entropy of DeepSpeed, its causal loss

The modules themselves need PyTorch only; a framework is imported where its own objects are changed.
"""
