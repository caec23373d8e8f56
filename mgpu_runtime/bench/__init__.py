"""The benchmarks: ours and its peers, in turn, in the same processes, on the same work."""
