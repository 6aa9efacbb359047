"""Process groups, megatron-core on a CPU, context parallelism."""
