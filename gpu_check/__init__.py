"""One command that says in minutes whether a GPU does what Tandem expects of it:  bash launch.sh gpu-check

Offline, with random weights. Every part is a file with `findings`, runs in a process of its own, and also runs on a CPU
at toy size, where speeds are figures and never verdicts. docs/gpu.md says what is proven by which part.
"""
