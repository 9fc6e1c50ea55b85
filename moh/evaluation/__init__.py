"""What is measured: accuracy, generation metrics, language benchmarks, and the heads themselves."""
