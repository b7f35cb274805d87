"""What users train on a frozen base: LoRA on attention linears, mixtures of LoRA experts in place of MLPs."""
