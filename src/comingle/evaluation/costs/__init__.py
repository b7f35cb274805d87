"""What a method costs before any training: floating-point operations, memory, and the paper's own figures."""
