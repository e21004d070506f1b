"""The demonstration of training: real jobs that rounds scale and move, and the proof that it cost nothing."""
