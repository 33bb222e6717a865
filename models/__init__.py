"""What is computed: config, parameters, the decoder, its operations, checkpoints, tokenizers."""
